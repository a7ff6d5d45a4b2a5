"""A TPU slice (or several over DCN) as the planner sees it: ranks, hosts, HBM, links.

Ranks are numbered slice by slice, host by host, x fastest.  A host is a 2x2 block of chips, so
its ranks are neighbours in the torus.
"""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from recsys_tpu.sharding.planner.chips import CHIPS, Chip
from recsys_tpu.sharding.planner.errors import PlanInputError

# docs.cloud.google.com/tpu/docs/v5e: the 2-D slice shapes; v6e has the same.
_FLAT_SHAPES = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
# docs.cloud.google.com/tpu/docs/v5p: shapes below one cube of 4x4x4; v4 and tpu7x have the same.
_SMALL_CUBES = ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4))
_SPEC = re.compile(r"^(?:(\d+)\*)?([a-z0-9]+):(\d+(?:x\d+)*)$")


@dataclass(frozen=True, kw_only=True)
class RowGroup:
    """A box of chips whose consecutive ranks share the rows of table-row-wise and grid shards.

    TorchRec calls it a node: its size is what LOCAL_WORLD_SIZE must say in the training job.

    Attributes:
        ranks: ranks of the box.
        box: chips along each axis.
        ring_bytes_per_s: what one rank can send to ranks of its box, one direction.
    """

    ranks: int
    box: tuple[int, ...]
    ring_bytes_per_s: float


@dataclass(frozen=True, kw_only=True)
class Topology:
    """One or more equal slices of one chip generation.

    Attributes:
        chip: facts of the chip.
        shape: chips along each ICI axis.
        wrap: whether each axis is closed to a ring.
        slices: slices joined by the data-centre network.
        host_shape: block of chips that one host owns, per axis.
    """

    chip: Chip
    shape: tuple[int, ...]
    wrap: tuple[bool, ...]
    slices: int
    host_shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if any(length % block for length, block in zip(self.shape, self.host_shape, strict=True)):
            raise PlanInputError(f"hosts of {self.host_shape} chips do not tile a slice of {self.shape}")

    def __str__(self) -> str:
        name = f"{self.chip.name}:{'x'.join(map(str, self.shape))}"
        return name if self.slices == 1 else f"{self.slices}*{name}"

    @property
    def slice_chips(self) -> int:
        return math.prod(self.shape)

    @property
    def chips(self) -> int:
        return self.slices * self.slice_chips

    @property
    def ranks(self) -> int:
        return self.chips * self.chip.devices

    @property
    def host_ranks(self) -> int:
        """Ranks of one host."""
        return math.prod(self.host_shape) * self.chip.devices

    @property
    def hosts(self) -> int:
        return self.ranks // self.host_ranks

    @property
    def hbm_bytes(self) -> int:
        """HBM of one rank."""
        return self.chip.hbm_bytes // self.chip.devices

    @property
    def hbm_bytes_per_s(self) -> float:
        return self.chip.hbm_bytes_per_s / self.chip.devices

    @property
    def flops(self) -> float:
        return self.chip.flops / self.chip.devices

    @cached_property
    def links(self) -> int:
        """ICI links of the worst-placed chip: two per ring, one per open axis (its end)."""
        return sum(
            2 if wrapped and length > 2 else 1
            for length, wrapped in zip(self.shape, self.wrap, strict=True)
            if length > 1
        )

    @cached_property
    def injection_bytes_per_s(self) -> float:
        """What one rank can send into the slice, one direction, with every link busy."""
        if self.links == 0:  # one chip: devices talk inside it
            return self.hbm_bytes_per_s
        return self.links * self.chip.link_bytes_per_s / self.chip.devices

    @cached_property
    def row_groups(self) -> tuple[RowGroup, ...]:
        """Blocks of consecutive ranks that rows may be split over: a host, a line of hosts, a plane, ...

        Only sizes that tile the slice into boxes of the torus, the whole slice last.
        """
        groups = []
        box = list(self.host_shape)
        groups.append(self._row_group(tuple(box)))
        for axis, (length, block) in enumerate(zip(self.shape, self.host_shape, strict=True)):
            hosts = length // block
            for part in range(2, hosts + 1):
                if hosts % part == 0:
                    box[axis] = block * part
                    groups.append(self._row_group(tuple(box)))
        return tuple(groups)

    @property
    def likely_row_groups(self) -> tuple[RowGroup, ...]:
        """Row groups that the planner tries: up to 2·√ranks, as larger ones leave few groups to balance."""
        return tuple(
            group
            for group in self.row_groups
            if group.ranks <= max(self.host_ranks, 2 * math.isqrt(self.ranks))
        )

    def row_group(self, ranks: int) -> RowGroup:
        """The row group of that many ranks.

        Raises:
            PlanInputError: no box of the torus has that many consecutive ranks.
        """
        for group in self.row_groups:
            if group.ranks == ranks:
                return group
        sizes = ", ".join(str(group.ranks) for group in self.row_groups)
        raise PlanInputError(f"{self}: no row group of {ranks} ranks; there are {sizes}")

    def _row_group(self, box: tuple[int, ...]) -> RowGroup:
        links = sum(
            2 if wrapped and side == length and length > 2 else 1
            for side, length, wrapped in zip(box, self.shape, self.wrap, strict=True)
            if side > 1
        )
        speed = links * self.chip.link_bytes_per_s / self.chip.devices if links else self.hbm_bytes_per_s
        return RowGroup(ranks=math.prod(box) * self.chip.devices, box=box, ring_bytes_per_s=speed)

    @cached_property
    def bisection_bytes_per_s(self) -> float:
        """One direction across the narrowest cut through the middle of a slice; inf for one chip."""
        cuts = [
            (2 if wrapped and length > 2 else 1) * self.slice_chips / length
            for length, wrapped in zip(self.shape, self.wrap, strict=True)
            if length > 1
        ]
        return min(cuts) * self.chip.link_bytes_per_s if cuts else math.inf

    @property
    def dcn_bytes_per_s(self) -> float:
        """One rank's share of its host's data-centre network, one direction."""
        return self.chip.dcn_bytes_per_s / self.chip.devices

    def coordinates(self, rank: int) -> tuple[int, tuple[int, ...], int]:
        """(slice, chip position along each axis, device within the chip) of a rank."""
        per_slice = self.slice_chips * self.chip.devices
        slice_index, rank = divmod(rank, per_slice)
        host, local = divmod(rank, self.host_ranks)
        local, device = divmod(local, self.chip.devices)
        position = []
        for length, block in zip(self.shape, self.host_shape, strict=True):
            host, block_index = divmod(host, length // block)
            local, inside = divmod(local, block)
            position.append(block_index * block + inside)
        return slice_index, tuple(position), device

    def to_dict(self) -> dict[str, Any]:
        """Everything, as plain values: what a plan file keeps and a loader compares."""
        return {
            "name": str(self),
            "shape": list(self.shape),
            "wrap": list(self.wrap),
            "slices": self.slices,
            "host_shape": list(self.host_shape),
            "chip": dataclasses.asdict(self.chip),
        }

    @classmethod
    def from_dict(cls, tree: dict[str, Any]) -> Topology:
        """Inverse of `to_dict`.  `chip` may also be the name of a known chip.

        Raises:
            PlanInputError: a key is missing, unknown or has a wrong value.
        """
        try:
            chip_tree = tree["chip"]
            chip = CHIPS[chip_tree] if isinstance(chip_tree, str) else Chip(**chip_tree)
            shape = tuple(int(length) for length in tree["shape"])
            return cls(
                chip=chip,
                shape=shape,
                wrap=tuple(bool(w) for w in tree.get("wrap", [False] * len(shape))),
                slices=int(tree.get("slices", 1)),
                host_shape=tuple(int(b) for b in tree.get("host_shape", shape)),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise PlanInputError(
                f"topology: {error!r}; a topology has chip (one of {', '.join(CHIPS)}, or all its facts), "
                "shape, and optionally wrap, slices, host_shape"
            ) from None


def parse_topology(text: str) -> Topology:
    """`v5p:4x4x4`, `2*v5p:4x4x4` (slices over DCN), `emulated:4` (ranks of one host) or a YAML file.

    Raises:
        PlanInputError: no such chip, or not a slice shape that Cloud TPU offers.
    """
    if text.endswith((".yaml", ".yml", ".json")):
        return _from_file(Path(text))
    match = _SPEC.match(text)
    if match is None:
        raise PlanInputError(
            f"topology {text!r}: expected CHIP:SHAPE such as v5p:4x4x4, 2*v5p:4x4x4, or a .yaml file"
        )
    slices = int(match[1] or 1)
    shape = tuple(int(length) for length in match[3].split("x"))
    if slices < 1 or min(shape) < 1:
        raise PlanInputError(f"topology {text!r}: sizes must be at least 1")
    if match[2] == "emulated":
        return emulated(slices * math.prod(shape))
    if match[2] not in CHIPS:
        raise PlanInputError(
            f"topology {text!r}: unknown chip {match[2]!r}; known: {', '.join(CHIPS)}, emulated"
        )
    return slice_topology(match[2], shape, slices=slices)


def slice_topology(chip_name: str, shape: tuple[int, ...], *, slices: int = 1) -> Topology:
    """A Cloud TPU slice of that shape.

    Raises:
        PlanInputError: Cloud TPU has no slice of that shape.
    """
    chip = CHIPS[chip_name]
    if shape not in slice_shapes(chip):
        raise PlanInputError(
            f"{chip_name} has no slice of shape {'x'.join(map(str, shape))}; "
            f"nearest: {_nearest_shapes(chip, shape)}"
        )
    if chip.mesh_axes == 2:
        # A ring closes only along a full side of the 16x16 pod.
        wrap = tuple(length == 16 for length in shape)
        host_shape = shape if math.prod(shape) <= 8 else (2, 2)
    else:
        # docs.cloud.google.com/tpu/docs/v4: a torus when every side is a multiple of 4.
        wrap = (all(length % 4 == 0 for length in shape),) * 3
        host_shape = (2, 2, 1)
    return Topology(chip=chip, shape=shape, wrap=wrap, slices=slices, host_shape=host_shape)


def emulated(ranks: int, host_ranks: int | None = None) -> Topology:
    """`ranks` processes, priced as v6e chips in a row: to try plans without a TPU.

    host_ranks: processes of each machine, a divisor of `ranks`; None: all are on one.
    """
    chip = dataclasses.replace(CHIPS["v6e"], name="emulated", mesh_axes=1)
    return Topology(chip=chip, shape=(ranks,), wrap=(False,), slices=1, host_shape=(host_ranks or ranks,))


def slice_shapes(chip: Chip) -> list[tuple[int, ...]]:
    """Every single-slice shape of a chip generation, by number of chips."""
    if chip.mesh_axes == 2:
        return list(_FLAT_SHAPES)
    sides = range(4, 4 * chip.max_chips, 4)
    cubes = []
    for x in sides:
        if x**3 > chip.max_chips:
            break
        for y in sides[x // 4 - 1 :]:
            if x * y * y > chip.max_chips:
                break
            cubes += [(x, y, z) for z in range(y, chip.max_chips // (x * y) + 1, 4)]
    # Long thin shapes are not sold: a side is at most 32 chips on the largest pods.
    cubes = [shape for shape in cubes if max(shape) <= 32]
    return [*_SMALL_CUBES, *sorted(cubes, key=lambda shape: (math.prod(shape), max(shape)))]


def compact_shape(chip: Chip, chips: int) -> tuple[int, ...] | None:
    """The shape of `chips` chips with the shortest longest side; None where there is none."""
    shapes = [shape for shape in slice_shapes(chip) if math.prod(shape) == chips]
    return min(shapes, key=lambda shape: (max(shape), -min(shape))) if shapes else None


def _nearest_shapes(chip: Chip, shape: tuple[int, ...]) -> str:
    chips = math.prod(shape)
    near = sorted(slice_shapes(chip), key=lambda other: (abs(math.prod(other) - chips), max(other)))[:4]
    return ", ".join("x".join(map(str, other)) for other in near)


def _from_file(path: Path) -> Topology:
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise PlanInputError(f"{path}: cannot be read as YAML: {error}") from None
    if not isinstance(tree, dict):
        raise PlanInputError(f"{path}: a topology is a mapping with chip and shape")
    tree.pop("name", None)
    return Topology.from_dict(tree)
