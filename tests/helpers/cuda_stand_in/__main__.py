"""Run a script with the stand-in in the place of CUDA."""

import os
import runpy
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent

if __name__ == "__main__":
    script, *arguments = sys.argv[1:]
    sys.path[0] = str(Path(script).resolve().parent)
    sys.path.insert(1, str(HERE.parent.parent))
    sys.path.append(str(HERE.parent))
    # Triton reads it when it is imported.
    os.environ["TRITON_INTERPRET"] = "1"
    from cuda_stand_in import install

    install()
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")
