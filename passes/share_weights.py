"""Draft weights that equal a weight of the target, element by element, become the target's own tensor.

A typical case is a draft head that was trained with the target's frozen embedding or vocabulary projection and has a
copy of it. (Heads that are loaded from a checkpoint get the target's tensor already while they are loaded, in
:mod:`specgraph.checkpoints.loading`.) Tensors that are merely close are not shared, because an embedding that moved a
little in training is another embedding.

Equal means what ``torch.equal`` means between tensors of one shape, dtype and device:

* NaN equals nothing, so a tensor that holds one is never shared (unless it is the target's memory already).
* -0.0 equals 0.0, so sharing can turn a zero of the draft into the zero of the other sign. Sums, products, norms and
  softmax then differ at most in the sign of a zero, which no comparison of logits and no sampling sees. Only an
  operation that tells the zeros apart (a division by the weight, ``atan2``, ``copysign``, ``signbit``) could give
  another value; language models have none on a weight.

A packed weight, which is several tensors, is compared and shared tensor by tensor, as these are stored.

Limits: the pass looks only at plain dense tensors that a ``get_attr`` node names (no meta or fake tensors, no
subclasses). Nothing may write a shared tensor; this holds because state is an input of
the step and never a buffer of a module. The memory of a replaced tensor is freed only when nothing refers to it any
more, and the user's own model may still do so.
"""

from __future__ import annotations

import itertools
import operator
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, fx, nn

from specgraph.ir.graphs import get_attribute, set_attribute
from specgraph.ir.program import TARGET_MODULES, Program
from specgraph.ir.tensors import FLOAT8, chunks, equal_tensors, view_of, widen
from specgraph.passes.base import NearMiss, Pass, PassResult

PROBE = 256
"""How many elements, evenly spread, are compared first. They rule out nearly every pair that is not equal."""
BYTES_PER_ELEMENT = 64
"""The most temporary memory that one compared element takes: a few values in double precision, and their masks."""
CHUNK = 32 * 2**20 // BYTES_PER_ELEMENT
"""How many elements are compared at a time, so that comparing takes 32 MiB of temporary memory at most."""
NEAR_MISS = 0.5
"""The share of elements below which tensors that differ are reported as near misses."""
LISTED = 20
"""The most near misses that are reported."""

ROTATED = 0.01
"""The largest relative difference between the lengths of two rows that is taken for a rotation of the matrix. Rounding
to half precision changes a length by less."""

_DTYPES = FLOAT8 | {
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
}  # fmt: skip


class ShareWeights(Pass, requires={"own_weights"}):
    """No options.

    A draft tensor is a near miss when the closest target tensor of its shape (both of one dtype, or both floating
    point) has the same name, or differs in fewer than :data:`NEAR_MISS` of the elements. Another dtype is converted to
    the draft's before elements are counted. The :data:`LISTED` closest ones are reported.
    """

    def apply(self, program: Program) -> PassResult:
        """Replace the attributes. Matches and notes count places, so a tied tensor counts once for each use.

        ``bytes_shared`` is the size of all storages that no module of the program uses any more.
        """
        candidates: dict[torch.Size, list[_Weight]] = defaultdict(list)
        targets = _weights(program, of_target=True)
        for weight in targets:
            candidates[weight.tensor.shape].append(weight)
        before = _storages(program)
        shared: list[tuple[str, Tensor, Tensor]] = []
        misses: list[tuple[float, NearMiss]] = []
        for draft in _weights(program, of_target=False):
            alike = [target for target in candidates[draft.tensor.shape] if draft.comparable(target)]
            alike.sort(key=lambda target: not (target.names & draft.names))  # stable: then in the target's order
            shares = _probe(draft, alike)
            found = self._equal_one(draft, alike, shares)
            if found is not None:
                shared += _share(program, draft, found)
            else:
                kin = self._kin(draft, targets, program.drafter.draft_to_target)
                misses += kin or self._near_miss(draft, alike, shares)
        misses.sort(key=lambda miss: miss[0])
        more = len(misses) - LISTED
        notes = [note for note, _, _ in shared]
        notes += [f"near misses that differ more and are not listed: {more}"] if more > 0 else []
        after = _storages(program)
        return PassResult(
            matches=len(shared),
            near_misses=tuple(miss for _, miss in misses[:LISTED]),
            bytes_shared=sum(size for storage, size in before.items() if storage not in after),
            notes=tuple(notes),
            equal_tensors=tuple((old, new) for _, old, new in shared),
        )

    def _equal_one(self, draft: _Weight, alike: list[_Weight], shares: list[float]) -> _Weight | None:
        """The first of the tensors that has the same memory, or else the first that is equal."""
        same = (target for target in alike if target.view == draft.view)
        likely = (target for target, share in zip(alike, shares, strict=True) if share == 0)
        equal = (target for target in likely if equal_tensors(draft.tensor, target.tensor, CHUNK))
        return next(itertools.chain(same, equal), None)

    def _kin(self, draft: _Weight, targets: list[_Weight], rows: Tensor | None) -> list[tuple[float, NearMiss]]:
        """A near miss if the draft's matrix was made from one of the target's: as some of its rows, or as a rotation.

        ``rows`` are the target ids of a reduced draft vocabulary. Such a matrix cannot be shared, because it is no
        tensor of the target. The report names it all the same, because it tells what a checkpoint holds.
        """
        for target in targets:
            chosen = _rows_of(draft, target, rows)
            if chosen is None:
                continue
            share, lengths = _compare_rows(draft.tensor.detach(), target.tensor.detach(), chosen, CHUNK)
            sliced = len(chosen) < len(target.tensor)
            what = f"{len(chosen)} rows of {target.where}, those of the draft's vocabulary"
            if sliced and share == 0:
                return [(share, NearMiss(draft.where, f"it holds {what}: a slice, which is no tensor of the target's"))]
            if sliced and share < NEAR_MISS:
                return [(share, NearMiss(draft.where, f"it holds {what}, but for {share:.2%} of the elements"))]
            if share >= NEAR_MISS and lengths < ROTATED:
                base = what if sliced else target.where
                return [(share, NearMiss(draft.where, f"its rows are as long as {base}, but differ: a rotation of it"))]
        return []

    def _near_miss(self, draft: _Weight, alike: list[_Weight], shares: list[float]) -> list[tuple[float, NearMiss]]:
        """The closest tensor and its share of differing elements, or nothing if none is close."""
        share, target = min(zip(shares, alike, strict=True), key=operator.itemgetter(0), default=(1.0, None))
        if alike and share >= NEAR_MISS:
            target = alike[0]  # tensors of the same name come first
        named = target is not None and bool(target.names & draft.names)
        if target is None or (share >= NEAR_MISS and not named):
            return []
        share, reason = _difference(draft, target, CHUNK)
        return [(share, NearMiss(draft.where, reason))] if named or share < NEAR_MISS else []


def _rows_of(draft: _Weight, target: _Weight, rows: Tensor | None) -> Tensor | None:
    """The indices of the target's rows that the draft matrix could hold; None if the two cannot be compared by rows."""
    a, b = draft.tensor, target.tensor
    matrices = a.dim() == b.dim() == 2 and a.shape[1] == b.shape[1]
    if not matrices or not draft.comparable(target) or not a.is_floating_point():
        return None
    if rows is not None and len(rows) == len(a) and bool(rows.max() < len(b)):
        return rows
    return torch.arange(len(b), device=b.device) if len(a) == len(b) and target.names & draft.names else None


def _compare_rows(a: Tensor, b: Tensor, rows: Tensor, limit: int) -> tuple[float, float]:
    """The share of elements of ``a`` that differ from ``b[rows]``, and the largest relative difference of two rows'
    lengths."""
    count, longest = 0, 0.0
    for chosen, own in zip(*(x.split(max(1, limit // a.shape[1])) for x in (rows, a)), strict=True):  # type: ignore[no-untyped-call]
        theirs = widen(b[chosen].to(a.dtype))
        mine = widen(own)
        count += int((mine != theirs).sum())
        lengths = theirs.norm(dim=1)
        longest = max(longest, float(((mine.norm(dim=1) - lengths).abs() / lengths.clamp_min(1e-30)).max()))
    return count / a.numel(), longest


@dataclass(frozen=True, eq=False)
class _Weight:
    """One tensor and the places (module, attribute) that name it. A tied tensor has several places."""

    tensor: Tensor
    places: list[tuple[str, str]]

    @property
    def names(self) -> set[str]:
        return {attribute for _, attribute in self.places}

    @property
    def where(self) -> str:
        return ".".join(self.places[0])

    @property
    def view(self) -> tuple[object, ...]:
        return view_of(self.tensor)

    @cached_property
    def sample(self) -> Tensor:
        """At most ``PROBE`` elements, on the CPU; the first and the last are among them."""
        size = self.tensor.numel()
        flat = torch.arange(min(PROBE, size)) * (size - 1) // max(min(PROBE, size) - 1, 1)
        index = torch.unravel_index(flat.to(self.tensor.device), self.tensor.shape)
        return self.tensor.detach()[index].reshape(-1).cpu()

    def comparable(self, other: _Weight) -> bool:
        """Whether the values of two tensors of the same shape can be compared."""
        a, b = self.tensor, other.tensor
        same_kind = a.dtype == b.dtype or (a.is_floating_point() and b.is_floating_point())
        return a.device == b.device and same_kind


def _weights(program: Program, of_target: bool) -> list[_Weight]:
    """The distinct tensors of the target's or of the draft's modules, in order of first use."""
    found: dict[tuple[object, ...], _Weight] = {}
    for name, module in program.modules.unchanged.items():
        if (name in TARGET_MODULES) == of_target:
            for attribute, tensor in _attributes(module):
                found.setdefault(view_of(tensor), _Weight(tensor, [])).places.append((name, attribute))
    return list(found.values())


def _attributes(module: fx.GraphModule) -> Iterator[tuple[str, Tensor]]:
    """The tensors that a graph names, except those of submodules that it calls, which copies of a program share."""
    called = tuple(f"{node.target}." for node in module.graph.nodes if node.op == "call_module")
    for target in dict.fromkeys(node.target for node in module.graph.nodes if node.op == "get_attr"):
        value = get_attribute(module, target)
        if _is_plain(value) and not target.startswith(called):
            yield target, value


def _is_plain(value: object) -> bool:
    """Whether it is a dense tensor whose elements can be read and compared."""
    if type(value) not in (Tensor, nn.Parameter):
        return False
    assert isinstance(value, Tensor)
    return value.layout == torch.strided and not value.is_meta and value.dtype in _DTYPES


def _storages(program: Program) -> dict[tuple[torch.device, int], int]:
    """Size in bytes of every storage the program's modules use."""
    sizes: dict[tuple[torch.device, int], int] = {}
    for module in program.modules.unchanged.values():
        for _, tensor in _attributes(module):
            storage = tensor.untyped_storage()
            sizes[storage.device, storage.data_ptr()] = storage.nbytes()
    return sizes


def _share(program: Program, draft: _Weight, target: _Weight) -> list[tuple[str, Tensor, Tensor]]:
    """Put the target's tensor into all places of the draft's.

    A parameter stays a parameter and a buffer a buffer: if the two tensors differ in this, the place gets a tensor of
    its own kind with the target's memory. Returns a line for the report, the old and the new tensor of every place that
    changed.
    """
    changes = []
    held = draft.view == target.view
    for name, attribute in draft.places:
        module = program.modules[name]
        old, new = get_attribute(module, attribute), target.tensor
        parameter = isinstance(old, nn.Parameter)
        other_kind = parameter != isinstance(new, nn.Parameter)
        if old is new or (held and other_kind):
            continue
        if other_kind:
            new = nn.Parameter(new, requires_grad=False) if parameter else new.detach()
        set_attribute(module, attribute, new)
        source = next((place for place in target.places if place[1] == attribute), target.places[0])
        size = f"{old.numel() * old.element_size():,} bytes" + (", its memory already" if held else "")
        changes.append((f"{name}.{attribute} -> {'.'.join(source)} {list(old.shape)}, {size}", old, new))
    return changes


def _probe(draft: _Weight, alike: list[_Weight]) -> list[float]:
    """For each tensor, the share of sampled elements that differ from the draft's; 0 does not prove equality."""
    if not alike:
        return []
    mine = widen(draft.sample)
    theirs = torch.stack([widen(target.sample.to(draft.tensor.dtype)) for target in alike])
    return ((theirs != mine).sum(1).double() / max(mine.numel(), 1)).tolist()


def _difference(draft: _Weight, target: _Weight, limit: int) -> tuple[float, str]:
    """The share of elements that differ, and a sentence with their number and the largest absolute difference."""
    a, b = draft.tensor.detach(), target.tensor.detach()
    count, nans, largest = 0, 0, 0.0
    for x, y in chunks(a, b, limit):
        x, y = widen(x), widen(y.to(a.dtype))
        nan = x.isnan() | y.isnan()
        unequal = x != y
        count += int(unequal.sum())
        nans += int(nan.sum())
        largest = max(largest, float((x - y).abs().masked_fill_(nan | ~unequal, 0).max()))
    reason = f"{count} of {a.numel()} elements differ from {target.where}, by at most {largest:.3g}"
    if nans:
        reason += f"; {nans} of them for a NaN, which equals nothing"
    if a.dtype != b.dtype:
        ours, other = (str(tensor.dtype).removeprefix("torch.") for tensor in (a, b))
        reason = f"it is {ours} and {target.where} is {other}; after conversion to {ours}, {reason}"
    return count / max(a.numel(), 1), reason
