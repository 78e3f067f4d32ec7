"""Open every page of the built site in Chromium, as a reader does.

    python docs/site/check.py build/site
    python docs/site/check.py build/site --screenshots FOLDER

Pages are found by links from the first one on. An error is a link or an anchor that leads nowhere, a file that is asked
of another host, an error of a script, a formula that is not rendered, a page that is wider than a phone, text or a
picture that is cut (on a desk also what one must scroll to, on a phone what nothing scrolls to), text that is too
faint, a header without version, and a search that does not find its page first. Playwright's own Chromium is used, or
the one that CHROMIUM names.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urldefrag, urljoin

from playwright.sync_api import Page, Response, sync_playwright

PHONE, DESK = {"width": 390, "height": 844}, {"width": 1280, "height": 900}
SHOWN = ("", "quickstart/", "drafts/", "own_loop/", "math/", "api/ops/", "examples/quickstart/", "evidence_leviathan/")
# What is searched for, and the page that must be the first result.
SEARCHES = {
    "verify_exact": "api/ops/",
    "install": "install/",
    "quickstart": "quickstart/",
    "streaming": "serving/",
    "stop": "serving/",
    "logprobs": "rollouts/",
    "tree": "capabilities/",
    "gpu": "gpu/",
    "hybrid": "models/",
    "server": "serving/",
    "own loop": "own_loop/",
}
# Text outside code that looks like a formula in its source.
UNRENDERED = r"""() => {
    const walker = document.createTreeWalker(document.querySelector('article'), NodeFilter.SHOW_TEXT);
    const found = [];
    while (walker.nextNode()) {
        const node = walker.currentNode;
        if (node.parentElement.closest('code, pre')) continue;
        if (/\\\(|\\\[|\$\$|\\[a-z]{2,}/.test(node.data)) found.push(node.data);
    }
    return found;
}"""
# Text whose contrast with its ground is less than WCAG's AA asks for, each kind once: 4.5, and 3 if it is large.
FAINT = r"""() => {
    const channels = color => color.match(/[\d.]+/g).map(Number);
    const over = (top, alpha, below) => top.slice(0, 3).map((value, i) => alpha * value + (1 - alpha) * below[i]);
    const alpha = color => color.length > 3 ? color[3] : 1;
    const light = color => {
        const [r, g, b] = color.map(v => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const found = new Map();
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
        const node = walker.currentNode.parentElement;
        const text = walker.currentNode.data.trim();
        if (!text || node.closest('.headerlink, script, style, noscript, .md-search')) continue;
        if (!node.checkVisibility({checkOpacity: true, checkVisibilityCSS: true})) continue;
        const parents = [];
        for (let each = node; each; each = each.parentElement) parents.unshift(getComputedStyle(each));
        let ground = [255, 255, 255], opacity = 1;
        for (const style of parents) {
            const own = channels(style.backgroundColor);
            ground = over(own, alpha(own), ground);
            opacity *= Number(style.opacity);
        }
        const style = parents.at(-1), color = channels(style.color), size = parseFloat(style.fontSize);
        const ink = over(color, alpha(color) * opacity, ground);
        const [low, high] = [light(ink), light(ground)].sort((a, b) => a - b);
        const ratio = (high + 0.05) / (low + 0.05);
        const least = size >= 24 || (size >= 18.66 && style.fontWeight >= 700) ? 3 : 4.5;
        const kind = `${node.tagName.toLowerCase()}.${node.className} ${style.color} on ${ground.map(Math.round)}`;
        if (ratio < least) found.set(kind, `${ratio.toFixed(2)}: ${kind}: ${text.slice(0, 40)}`);
    }
    return [...found.values()];
}"""
# What ends to the right of a box around it: in one that scrolls it is cut on a desk only, unless it is a formula.
CUT = """isDesk => {
    const found = new Map();
    const walker = document.createTreeWalker(document.querySelector('article'), NodeFilter.SHOW_ALL);
    while (walker.nextNode()) {
        const node = walker.currentNode, isText = node.nodeType === Node.TEXT_NODE, parent = node.parentElement;
        if (!(isText ? node.data.trim() : node.tagName === 'IMG')) continue;
        if (parent.closest('.headerlink, .arithmatex')) continue;
        const range = document.createRange();
        range.selectNode(node);
        const right = Math.max(...[...range.getClientRects()].map(each => each.right));
        for (let box = parent; box; box = box.parentElement) {
            const kind = box === document.body ? 'hidden' : getComputedStyle(box).overflowX;
            if (kind === 'visible') continue;
            const scrolls = kind !== 'hidden' && kind !== 'clip';
            if (scrolls && !isDesk) break;
            const edge = box.getBoundingClientRect().right;
            if (right > edge + 1) {
                const where = parent.closest('table, pre, p, li') || parent;
                found.set(where, `${box.tagName} ends at ${Math.round(edge)}, ${Math.round(right)}: ` +
                    (isText ? node.data : node.src).trim().slice(0, 40));
                break;
            }
        }
    }
    return [...found.values()];
}"""
LINKS = "() => [...document.querySelectorAll('a[href]')].map(a => a.href)"
RESULTS = "links => links.map(link => link.href.split('#')[0])"
IDS = "() => [...document.querySelectorAll('[id], a[name]')].map(each => each.id || each.name)"


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        pass


def check(page: Page, root: str, screenshots: Path | None) -> list[str]:
    def missing(answer: Response) -> str:
        # A page that is not there is the fault of the page that leads to it.
        return f"{origin if answer.url == here else here}: {answer.url}: {answer.status}"

    errors: list[str] = []
    here = origin = root
    page.on("pageerror", lambda error: errors.append(f"{here}: {error}"))
    page.on("requestfailed", lambda request: errors.append(f"{here}: {request.url} failed"))
    page.on("response", lambda answer: answer.status < 400 or errors.append(missing(answer)))
    page.on("request", lambda each: each.url.startswith(root) or errors.append(f"{here}: asks {each.url}"))
    ids: dict[str, set[str]] = {}
    links: list[tuple[str, str]] = []
    # Pages to open, each with the page that leads there.
    waiting = {root: root}
    while waiting:
        here, origin = waiting.popitem()
        page.set_viewport_size(DESK)
        answer = page.goto(here)
        if answer is None or answer.status >= 400:
            ids[here] = set()
            continue
        ids[here] = set(page.evaluate(IDS))
        if here.endswith(".txt"):
            continue
        errors += [f"{here}: not rendered: {text!r}" for text in page.evaluate(UNRENDERED)]
        for link in page.evaluate(LINKS):
            if link.startswith(root):
                links.append((here, link))
                place = urldefrag(link).url
                if place not in ids:
                    waiting.setdefault(place, here)
        name = here.removeprefix(root)
        errors += [f"{here}: too faint: {text}" for text in page.evaluate(FAINT)]
        if not page.locator(".md-header__source").is_visible():
            errors.append(f"{here}: the header has no version")
        for device, size in (("desk", DESK), ("phone", PHONE)):
            page.set_viewport_size(size)
            errors += [f"{here}: cut on a {device}: {text}" for text in page.evaluate(CUT, device == "desk")]
            width = page.evaluate("() => document.documentElement.scrollWidth")
            if width > size["width"]:
                errors.append(f"{here}: is {width} pixels wide on a {device} of {size['width']}")
            if screenshots is not None and name in SHOWN:
                page.screenshot(path=screenshots / f"{name.replace('/', '_')}{device}.png", full_page=name == "")
    for here, link in links:
        place, anchor = urldefrag(link)
        if anchor and anchor not in ids[place]:
            errors.append(f"{here}: a link leads to {link}, which has no such anchor")
    page.set_viewport_size(DESK)
    for words, name in SEARCHES.items():
        page.goto(root)
        page.locator("[data-md-component=search-query]").fill(words)
        page.wait_for_selector(".md-search-result__link", timeout=10_000)
        found = page.eval_on_selector_all(".md-search-result__link", RESULTS)
        pages = list(dict.fromkeys(link.removeprefix(root).split("?")[0] for link in found))
        if name != pages[0]:
            errors.append(f"a search for {words!r} does not find {name} first, but {pages[:5]}")
    if screenshots is not None:
        page.screenshot(path=screenshots / "search.png")
    print(f"{len(ids)} pages, {len(links)} links")
    return errors


def check_dark(page: Page, root: str, screenshots: Path | None) -> list[str]:
    errors: list[str] = []
    for name in SHOWN:
        page.goto(root + name)
        errors += [f"{root}{name}: too faint in the dark: {text}" for text in page.evaluate(FAINT)]
        for device, size in (("desk", DESK), ("phone", PHONE)):
            page.set_viewport_size(size)
            if screenshots is not None:
                page.screenshot(path=screenshots / f"dark_{name.replace('/', '_')}{device}.png", full_page=name == "")
    return errors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("site", type=Path)
    parser.add_argument("--screenshots", type=Path, help="a folder for pictures of some pages")
    args = parser.parse_args()
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(args.site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=os.environ.get("CHROMIUM"), args=["--no-sandbox"])
        root = urljoin(f"http://127.0.0.1:{server.server_port}", "/")
        errors = check(browser.new_page(), root, args.screenshots)
        errors += check_dark(browser.new_page(color_scheme="dark"), root, args.screenshots)
        browser.close()
    print("\n".join(errors))
    sys.exit(bool(errors))


if __name__ == "__main__":
    main()
