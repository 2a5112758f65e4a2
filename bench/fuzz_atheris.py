"""Coverage-guided fuzzing of the readers written in Python; not part of the test run. See docs/security.md.

    pip install '.[fuzz]'
    python bench/fuzz_atheris.py -atheris_runs=100000

The first byte chooses the reader, the rest is the file. A crash is kept by libFuzzer as ``crash-*``.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["sortrl.verify", "sortrl.teachers", "sortrl.report", "sortrl.core.files"]):
    from sortrl.core.errors import SortRLError
    from sortrl.core.files import read_json
    from sortrl.data.dataset import load_demonstrations
    from sortrl.nets import SortPolicy
    from sortrl.report import summary_lines
    from sortrl.teachers import Teacher, load_normalizer, load_teacher
    from sortrl.verify import verify

FOLDER = Path(tempfile.mkdtemp(prefix="sortrl-atheris-"))
READERS = (
    ("p.safetensors", SortPolicy.load),
    ("d.safetensors", load_demonstrations),
    ("t.safetensors", Teacher.load),
    ("c.safetensors", verify),
    ("agent.zip", load_teacher),
    ("stats.pkl", lambda file: load_normalizer(file, True)),
    ("n.json", load_normalizer),
    ("r.json", lambda file: summary_lines(read_json(file))),
)


def one(data: bytes) -> None:
    name, read = READERS[data[0] % len(READERS)] if data else READERS[0]
    file = FOLDER / name
    file.write_bytes(data[1:])
    try:
        read(file)
    except SortRLError:
        return


if __name__ == "__main__":
    atheris.Setup(sys.argv, one)
    atheris.Fuzz()
