"""The step graph as a drafter sees it while it writes its nodes: what was accepted, what the target computed, how a
draft is drawn, and what it may keep.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, fx

from specgraph.errors import PassError
from specgraph.ir.drafter import SCRATCH
from specgraph.ir.graphs import arguments, calls, constant
from specgraph.ir.program import Program
from specgraph.kernels import step
from specgraph.kernels.sampling.sample import STEP_NOISE_RULES
from specgraph.kernels.state import CONFIDENCE, ROW_INDEX, ROWS, Buffer, Input, per_call
from specgraph.kernels.step.finalize import StepUpdate

SAMPLING = {
    "temperature": Buffer(("B",), torch.float32),
    "seeds": Buffer(("B",)),
    "top_k": Buffer(("B",)),
    "top_p": Buffer(("B",), torch.float32, 1.0),
    "min_p": Buffer(("B",), torch.float32),
}
"""The state that drawing a token reads."""
VERIFIED = "verified_tokens"
"""The input ``[B, T]`` that holds the tokens which verification gave, padded with -1, until a pass computes them."""
EOS_IDS = Buffer(("B", "E"), fill=-1)
"""The state ``eos_ids``: the tokens that end each sequence, padded with -1."""
POINT_MASS = "point_mass"
"""The state, bool ``[B]``, that says which sequences' drafts are point masses although ``draft_logits`` are kept."""


@dataclass(frozen=True)
class DraftStep:
    """A step graph whose target has run, before its drafts are proposed.

    Nodes, for ``B`` sequences and ``T`` rows of the window: ``emitted`` ``[B, T]``, the tokens that verification
    emitted, padded with -1; ``num_emitted`` ``[B]``; ``window`` ``[B, T]``, its first column the last token that was
    known before; ``start`` ``[B]``, the position of that one. All that a drafter derives from the emitted tokens are
    results of one call, ``update``, which is one launch.

    Attributes:
        program: what the nodes are appended to.
        rule: the verification rule, which decides the noise that drafts are drawn with.
    """

    program: Program
    rule: str

    @property
    def window(self) -> fx.Node:
        return self.program.input("window")

    @property
    def start(self) -> fx.Node:
        return self.program.input("start")

    @property
    def update(self) -> fx.Node:
        """The call of :func:`~specgraph.kernels.step.finalize_step`; the first one to ask for it appends it."""
        program = self.program
        for node in calls(program.graph, step.finalize_step):
            return node
        tokens = program.placeholder(VERIFIED, per_call("B", "T", fill=-1))
        num_forced = program.placeholder("num_forced", Buffer(("B",)))
        eos_ids = program.placeholder("eos_ids", EOS_IDS)
        return self.call(step.finalize_step, tokens, self.window, self.start, num_forced, eos_ids, name="update")

    @property
    def emitted(self) -> fx.Node:
        return self._result("emitted", role="emitted")

    @property
    def num_emitted(self) -> fx.Node:
        return self._result("num_emitted", role="num_emitted")

    @property
    def last(self) -> fx.Node:
        """The last row ``[B]`` of the accepted ones, ``num_emitted - 1``."""
        return self._result("last")

    @property
    def length(self) -> fx.Node:
        """The number of accepted tokens ``[B]``. The last one is at the position ``start + num_emitted``."""
        return self._result("length")

    def _result(self, field: str, name: str | None = None, role: str | None = None) -> fx.Node:
        """A result of ``update`` as a node, which is made when it is first asked for."""
        update, index = self.update, StepUpdate._fields.index(field)
        for user in update.users:
            if user.target is operator.getitem and user.args[1] == index:
                return user
        with self.program.graph.inserting_after(update):
            return self.program.call(operator.getitem, update, index, name=name or field, role=role)

    @property
    def rows(self) -> fx.Node:
        """The row index ``[B]``, for functions of an indexed buffer (:attr:`Buffer.indexed`)."""
        return self.program.placeholder(ROWS, ROW_INDEX)

    @property
    def positions(self) -> fx.Node:
        """Absolute positions ``[B, T]`` of the window's rows. Row ``i`` of what was accepted has the ``i``-th one."""
        return self.program.one("positions")

    @property
    def target_vocab_size(self) -> int:
        """Tokens of the target's vocabulary."""
        return self.program.target.vocab_size

    def call(self, target: Callable[..., Any] | str, /, *args: Any, name: str, **kwargs: Any) -> fx.Node:
        """Append a call of a function of :mod:`specgraph.kernels.step`, or of a module by its name."""
        return self.program.call(target, *args, name=name, **kwargs)

    def cut(self, values: fx.Node, first: int, count: int, name: str) -> fx.Node:
        """Append the rows ``values[:, first : first + count]``."""
        return self.call(operator.getitem, values, (slice(None), slice(first, first + count)), name=name)

    def draft(self, /, *args: Any, name: str, **kwargs: Any) -> fx.Node:
        """Append a call of the module ``draft``."""
        return self.program.call("draft", *args, name=name, role="draft", **kwargs)

    def mark_scratch(self, call: fx.Node) -> None:
        """Mark a draft call whose cached rows later steps write again before they read them.

        A step that makes fewer drafts, and so needs no result of the call, leaves it out.
        """
        call.meta[SCRATCH] = True

    def features(self) -> list[fx.Node]:
        """The target's hidden states ``[B, T, Ht]`` that the drafter reads, of all rows of the window.

        Raises:
            PassError: ``expose_features`` has not made them visible.
        """
        drafter, found = self.program.drafter, self.program.with_role("feature")
        if len(found) != len(drafter.features):
            raise PassError(
                f"insert_draft: {drafter.name} reads hs{list(drafter.features)} of the target, and {len(found)} are "
                "there; put expose_features before it in pipeline.order, with layers unset."
            )
        return found

    def next_tokens(self, vocab_size: int) -> fx.Node:
        """The input ``[B, T]`` of a shifted drafter: row ``t`` holds the token that followed the target's row ``t``.

        Padding is clamped into the drafter's vocabulary. Its rows are not real.
        """
        self._shape_rows(shifted=True, vocab_size=vocab_size)
        return self._result("rows", "drafter_tokens")

    def caught_up(self, vocab_size: int) -> tuple[fx.Node, fx.Node, fx.Node]:
        """All accepted tokens of this step as rows of an unshifted drafter: tokens, positions, how many are real.

        The tokens ``[B, T + 1]`` are the window's first one and the emitted ones, clamped into the vocabulary.
        """
        self._shape_rows(shifted=False, vocab_size=vocab_size)
        tokens, positions = self._result("rows", "drafter_tokens"), self._result("positions", "accepted_positions")
        return tokens, positions, self._result("num_rows", "accepted_rows")

    def _shape_rows(self, **options: Any) -> None:
        """Set which rows of accepted tokens ``update`` lays out. All calls in one step must ask for the same rows."""
        given = {name: self.update.kwargs.get(name, value) for name, value in options.items()}
        if given != options:
            raise PassError(f"The rows of a drafter are asked for with {given} and with {options}; ask for one kind.")
        self.update.kwargs = {**self.update.kwargs, **options}

    def position(self, offset: int, name: str) -> fx.Node:
        """Append the position ``[B, 1]`` that is ``offset`` after the last accepted token."""
        if offset < 0:
            return self.call(operator.add, self.position(0, f"{name}_last"), offset, name=name)
        chain = max(offset + 1, arguments(self.update)["chain"])
        self.update.kwargs = {**self.update.kwargs, "chain": chain}
        return self.call(operator.getitem, self._result("chain"), offset, name=name)

    def state(self, name: str, buffer: Input) -> fx.Node:
        """A state input of the step: what the drafter keeps between steps."""
        return self.program.placeholder(name, buffer)

    def propose(self, target: Callable[..., Any] | str, /, *args: Any, name: str, **kwargs: Any) -> fx.Node:
        """Append a call that gives draft tokens ``[B, k]`` themselves (-1: no draft): point masses."""
        return self.program.call(target, *args, name=name, role="drafts", **kwargs)

    def take_drafts(self) -> list[fx.Node]:
        """The drafts ``[B, k]`` that were proposed and drawn so far, in order. They are no drafts of the step any more.

        A drafter that chooses between two ways of drafting makes both, takes them, and proposes what it chooses.
        """
        taken = self.program.with_role("drafts")
        for node in taken:
            del node.meta["role"]
        return taken

    def keep_point_mass(self, chosen: fx.Node) -> None:
        """Append a node that keeps which sequences' drafts are point masses: ``chosen``, bool ``[B]``.

        For drafters that also draw. Where nothing is drawn, all drafts are point masses without saying so; and rules
        that compare no distributions do not ask.
        """
        if self.rule in STEP_NOISE_RULES:
            kept = self.state(POINT_MASS, Buffer(("B",), torch.bool))
            self.call(step.keep_point_mass_, kept, chosen, self.num_emitted, name="keep_point_mass_")

    def keep_confidence(self, estimates: fx.Node) -> None:
        """Append a node that keeps the probability that each draft is accepted if those before it are: ``[B, K]``.

        The host reads it with the results of the step.
        """
        kept = self.state(CONFIDENCE, Buffer(("B", self.program.drafter.num_speculative_tokens), torch.float32))
        self.call(step.keep_confidence_, kept, estimates, self.num_emitted, name="keep_confidence_")

    def draw(self, logits: fx.Node, row: int, vocab_size: int, dtype: torch.dtype, name: str | None = None) -> fx.Node:
        """Append a node that draws drafts number ``row``, ``row + 1``, ... ``[B, R]`` from logits ``[B, R, Vd]``.

        ``vocab_size`` is ``Vd``, ``dtype`` that of the logits. Rules that compare distributions keep what the drafts
        were drawn from in the state ``draft_logits``.
        """
        sampling = [self.state(key, buffer) for key, buffer in SAMPLING.items()]
        kept = self._kept_logits(vocab_size, dtype)
        options: dict[str, Any] = {"row": row, "rule": self.rule, "target_vocab_size": self.target_vocab_size}
        options |= {} if kept is None else {"rows": self.rows}
        if self.program.drafter.draft_to_target is not None:
            options["draft_to_target"] = self._vocabulary(self.program.drafter.draft_to_target)
        return self.program.call(
            step.propose_, kept, logits, self.length, self.num_emitted, *sampling, name=name or f"token_{row + 1}",
            role="drafts", **options,
        )  # fmt: skip

    def drafts_wanted(self) -> fx.Node:
        """Append a node that says how many drafts of each sequence the next step can verify at most: ``[B]``."""
        state = {name: self.state(name, Buffer(("B",))) for name in ("num_rows", "num_forced", "max_length")}
        return self.call(
            step.drafts_wanted, self.window, self.start, state["num_rows"], state["num_forced"], self.emitted,
            self.num_emitted, state["max_length"], self.state("eos_ids", EOS_IDS), name="wanted",
        )  # fmt: skip

    def survival(self, logits: fx.Node, wanted: fx.Node, before: fx.Node | None, row: int) -> fx.Node:
        """Append a node that says how probable it is that draft number ``row`` and all before it are accepted.

        ``logits`` are those of the draft, ``wanted`` is what :meth:`drafts_wanted` gives, and ``before`` what this
        gave for the draft in front of it.
        """
        least = self.program.drafter.least_survival
        return self.call(step.survival, logits, wanted, before, row=row, least=least, name=f"survival_{row + 1}")

    def end_chain(self, token: fx.Node, before: fx.Node) -> fx.Node:
        """Append a node with the draft that ``token`` draws, or none where the survival ``before`` it is 0."""
        del token.meta["role"]
        return self.propose(step.where_surviving, token, before, name=f"{token.name}_if_surviving")

    def _kept_logits(self, vocab_size: int, dtype: torch.dtype) -> fx.Node | None:
        """The buffer of what drafts were drawn from, for rules that compare distributions."""
        if self.rule not in STEP_NOISE_RULES:
            return None
        shape = ("B", self.program.drafter.num_speculative_tokens, vocab_size)
        return self.state("draft_logits", Buffer(shape, torch.promote_types(dtype, torch.float32), indexed=True))

    def _vocabulary(self, draft_to_target: Tensor) -> fx.Node:
        """The target id of every draft id as a node in front of all others."""
        for node in self.program.graph.find_nodes(op="call_module", target="draft_to_target"):
            return cast(fx.Node, node)
        self.program.modules["draft_to_target"] = constant(draft_to_target, "draft_to_target")
        with self.program.graph.inserting_before(self.positions):
            return self.program.call("draft_to_target")
