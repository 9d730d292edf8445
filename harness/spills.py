"""How much the shipped tiles spill, as it was recorded: `spills.yaml`, which the tests and `harness compile` share.

An entry is for one port, version of its compiler, target and mask, in bf16: `head_dims` are those that were built, and
`spills` the bytes a thread of each kernel that spilled at all. TileLang's compiler is two, itself and the nvcc that it
calls; those of Triton and CuTe DSL are whole. More than is recorded is a regression of a kernel, of the choice of a
tile, or of the compiler; less is a reason to record anew (`harness compile --record`).

TileLang alone does not always build a kernel the same way: where a barrier may stand in one place or another it takes
now this one and now that, and what is spilled differs with it. For that there is SLACK.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

PATH = Path(__file__).with_name("spills.yaml")
SLACK = {"tilelang": 64}  # bytes a thread; 96 and 136 were seen of one kernel
Key = tuple[str, str, str, str]  # port, compiler, target, mask

HEADER = """\
# Bytes of spills a thread of the shipped tiles in bf16, see spills.py; `harness compile --record` writes this file.
# Of the head_dims of an entry, kernels that are not named spill nothing; of others nothing is known.
"""


@dataclass(frozen=True)
class Built:
    """One kernel as it was built, and what it spilled. compiler: see `harness.compilers`."""

    port: str
    compiler: str
    target: str
    mask: str
    head_dim: int
    kernel: str
    spills: int

    @property
    def key(self) -> Key:
        """The entry that it belongs to."""
        return self.port, self.compiler, self.target, self.mask

    @property
    def name(self) -> str:
        """Its name in the entry."""
        return f"{self.kernel} d{self.head_dim}"


class Spills:
    """The records of a file; none where there is no such file."""

    def __init__(self, path: Path = PATH) -> None:
        self._path = path
        self._entries: dict[Key, dict[str, Any]] = {}
        for entry in yaml.safe_load(path.read_text()) if path.exists() else ():
            key = entry["port"], entry["compiler"], entry["target"], entry["mask"]
            self._entries[key] = {"head_dims": entry["head_dims"], "spills": entry["spills"]}

    def before(self, built: Built) -> int | None:
        """What the kernel spilled with this compiler, or else the most it did with another; None if never built."""
        same = self._of(built.key, built)
        if same is not None:
            return same
        port, _, target, mask = built.key
        known = [self._of(key, built) for key in self._entries if (key[0], *key[2:]) == (port, target, mask)]
        return max((spills for spills in known if spills is not None), default=None)

    def _of(self, key: Key, built: Built) -> int | None:
        entry = self._entries.get(key)
        if entry is None or built.head_dim not in entry["head_dims"]:
            return None
        return entry["spills"].get(built.name, 0)

    def record(self, kernels: Iterable[Built]) -> None:
        """Writes the file anew with what these kernels spill; what is known of others stays."""
        for built in kernels:
            entry = self._entries.setdefault(built.key, {"head_dims": [], "spills": {}})
            entry["head_dims"] = sorted({*entry["head_dims"], built.head_dim})
            entry["spills"].pop(built.name, None)
            if built.spills:
                entry["spills"][built.name] = built.spills
        lines = [HEADER]
        for key, entry in sorted(self._entries.items()):
            about = dict(zip(("port", "compiler", "target", "mask"), key, strict=True))
            spilled = ", ".join(f"{name}: {size}" for name, size in sorted(entry["spills"].items()))
            values = about | {"head_dims": entry["head_dims"], "spills": f"{{{spilled}}}"}
            lines.append("- " + "\n  ".join(f"{name}: {value}" for name, value in values.items()) + "\n")
        self._path.write_text("".join(lines))
