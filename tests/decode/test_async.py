"""Tasks that wait for a request: they hear of every token and of its end, and a task that leaves cancels it."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any
from unittest import mock

import pytest
import torch
from tiny_models import VOCAB, PairModel, random_table
from tiny_requests import texts_alone

from torch_specops import Completion, Request, Session, SpeculativeDecoder
from torch_specops.decode import Handle
from torch_specops.drafts import PromptLookup

WAIT = 20.0
LONG = Request([5, 6, 7], 60, seed=[3], eos_token_id=())


def decoder() -> SpeculativeDecoder:
    return SpeculativeDecoder(PairModel(random_table(VOCAB, seed=5)), PromptLookup(min_ngram=1), num_draft_tokens=3)


@pytest.fixture
def session() -> Iterator[Session]:
    with decoder().session(1, max_length=64) as opened:
        yield opened


async def tokens_of(handle: Handle) -> list[int]:
    return [token async for token in handle]


async def soon(awaitable: Awaitable[Any]) -> Any:
    return await asyncio.wait_for(awaitable, WAIT)


async def started(*awaitables: Awaitable[Any]) -> list[asyncio.Future[Any]]:
    """Tasks, each as far as its first wait."""
    tasks = [asyncio.ensure_future(each) for each in awaitables]
    await asyncio.sleep(0)
    return tasks


def test_async_tokens_come_in_order() -> None:
    """In three loops, while another thread steps. A wake-up that is lost, or set in the wrong thread, would time out;
    one that comes before the tokens would end a text early."""
    requests = [Request([5, 6, number], 20 + number, seed=[number], eos_token_id=()) for number in range(6)]
    expected = texts_alone(decoder(), requests)

    async def wait(handles: list[Handle]) -> list[Any]:
        waiting = [each for handle in handles for each in (tokens_of(handle), tokens_of(handle), handle)]
        return list(await asyncio.wait_for(asyncio.gather(*waiting), WAIT))

    with decoder().session(3, max_length=64) as session, ThreadPoolExecutor(4) as pool:
        handles = [session.submit(request) for request in requests]
        loops = [pool.submit(asyncio.run, wait(handles)) for _ in range(3)]
        blocking = pool.submit(lambda: [list(handle.tokens()) for handle in handles])
        thread = threading.Thread(target=session.run)
        thread.start()
        assert blocking.result(WAIT) == expected
        for loop in loops:
            found = loop.result(WAIT)
            assert found[::3] == found[1::3] == expected
            assert all(found[3 * place + 2] is handle.result(0) for place, handle in enumerate(handles))
        # Tasks that come after the end do not wait for it.
        assert asyncio.run(wait(handles))[::3] == expected
    thread.join(WAIT)


def test_async_tokens_before_a_wait(session: Session) -> None:
    async def wait(read: Callable[[Handle], Awaitable[Any]]) -> Any:
        handle, loop = session.submit(LONG), asyncio.get_running_loop()
        create = loop.create_future

        def late() -> Any:
            # The task has looked by now, if it looks before it can be woken.
            while not handle.done:
                session.step()
            return create()

        with mock.patch.object(loop, "create_future", late):
            task = asyncio.ensure_future(read(handle))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        assert task.done()
        return handle

    async def completion(handle: Handle) -> Completion:
        return await handle

    for read in (tokens_of, completion):
        assert asyncio.run(wait(read)).result(0).finish_reason == "length"


def test_a_step_wakes_each_waiting_task_once(session: Session) -> None:
    """Nothing else wakes a task, and no task has a thread. Who waits for the end is not woken by tokens."""

    async def wait() -> None:
        loop, threads = asyncio.get_running_loop(), threading.active_count()
        handle, other = session.submit(LONG), session.submit(LONG)
        tasks = await started(tokens_of(handle), tokens_of(handle), handle, tokens_of(other))
        assert threading.active_count() == threads
        call, woken = loop.call_soon_threadsafe, []
        with mock.patch.object(loop, "call_soon_threadsafe", lambda *args: woken.append(call(*args))):
            for _ in range(3):
                session.step()
                assert len(woken) == 2
                woken.clear()
                await asyncio.sleep(0)
                await asyncio.sleep(0)
            while not handle.done:
                session.step()
            # The two that read tokens were woken by the step after they had begun to wait.
            assert len(woken) == 3
        assert await asyncio.wait_for(asyncio.gather(*tasks[:3]), WAIT)
        assert not tasks[3].done()
        tasks[3].cancel()
        with suppress(asyncio.CancelledError):
            await tasks[3]

    asyncio.run(wait())


async def by_cancelling(waiting: Awaitable[Any]) -> None:
    (task,) = await started(waiting)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def by_time(waiting: Awaitable[Any]) -> None:
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(waiting, 0.01)


async def leave_loop(handle: Handle, how: str) -> None:
    """Leave `async for` after the first token."""
    with suppress(ArithmeticError):
        await asyncio.wait_for(handle_loop(handle, how), WAIT)


async def handle_loop(handle: Handle, how: str) -> None:
    if how == "close":
        iterator: Any = handle.__aiter__()
        await anext(iterator)
        await iterator.aclose()
        return
    async for _ in handle:
        if how == "error":
            raise ArithmeticError
        break


WAYS: dict[str, Callable[[Handle], Awaitable[None]]] = {
    "await, cancelled": by_cancelling,
    "await, out of time": by_time,
    "loop, cancelled": lambda handle: by_cancelling(tokens_of(handle)),
    "loop, out of time": lambda handle: by_time(tokens_of(handle)),
    "loop, break": lambda handle: leave_loop(handle, "break"),
    "loop, error": lambda handle: leave_loop(handle, "error"),
    "loop, close": lambda handle: leave_loop(handle, "close"),
}


@pytest.mark.parametrize("waits, way", [*((False, way) for way in WAYS), *((True, way) for way in list(WAYS)[:4])])
def test_who_leaves_frees_the_request_and_its_row(session: Session, waits: bool, way: str) -> None:
    async def leave() -> Handle:
        first = session.submit(LONG)
        handle = session.submit(LONG) if waits else first
        session.step()
        await WAYS[way](handle)
        # A generator that nobody holds is closed by its loop.
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert handle.done is waits and not handle._futures
        session.step()
        assert handle.result(0).finish_reason == "cancelled" and first.done is not waits
        return first

    first = asyncio.run(leave())
    first.cancel()
    after = session.submit(LONG)
    while not after.done:
        session.step()
    assert after.result(0).new_tokens.tolist() == texts_alone(decoder(), [LONG])[0]


def test_async_cancel_after_a_wake(session: Session) -> None:
    """Before it has run: the future that it waits for is cancelled when the wake-up comes."""

    async def leave() -> Handle:
        errors: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: errors.append(context))
        handle = session.submit(LONG)
        (task,) = await started(tokens_of(handle))
        session.step()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0)
        assert errors == []
        return handle

    handle = asyncio.run(leave())
    session.step()
    assert handle.result(0).finish_reason == "cancelled"


def test_a_shield_keeps_the_request(session: Session) -> None:
    async def leave() -> Completion:
        handle = session.submit(LONG)
        other = asyncio.ensure_future(handle)
        await by_cancelling(asyncio.shield(other))
        await by_time(asyncio.shield(other))
        while not handle.done:
            session.step()
        return await other

    assert asyncio.run(leave()).finish_reason == "length"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_async_loop_closed_before_the_end(session: Session) -> None:
    """The session's thread must not hear of it, and what else waits must."""
    handle, loops = session.submit(LONG), []
    for read in (tokens_of, handle_loop):
        loop = asyncio.new_event_loop()
        task = loop.create_task(read(handle) if read is tokens_of else read(handle, "break"))
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()
        # Nobody is told that it was never ended.
        task._log_destroy_pending = False
        loops.append(task)
    assert len(handle._futures) == 2
    with ThreadPoolExecutor(1) as pool:
        thread = pool.submit(asyncio.run, soon(tokens_of(handle)))
        while len(handle._futures) < 3:
            pass
        while not handle.done:
            session.step()
        assert thread.result(WAIT) == handle.result(0).new_tokens.tolist()
    assert not handle._futures and handle.result(0).finish_reason == "length"
    del loops, task
    gc.collect()


def test_async_interrupt_leaves_no_task_waiting(session: Session) -> None:
    async def wait() -> list[Any]:
        loop = asyncio.get_running_loop()
        handles = [session.submit(Request([5], 1, eos_token_id=())), session.submit(LONG)]
        tasks = await started(*handles)
        wake, calls = loop.call_soon_threadsafe, []

        def interrupted(*arguments: Any) -> None:
            calls.append(arguments)
            if len(calls) == 1:
                raise KeyboardInterrupt
            wake(*arguments)

        with mock.patch.object(loop, "call_soon_threadsafe", interrupted), pytest.raises(KeyboardInterrupt):
            session.step()
        return [done.finish_reason for done in await asyncio.wait_for(asyncio.gather(*tasks), WAIT)]

    assert asyncio.run(wait()) == ["length", "error"]
    assert torch.is_grad_enabled()
