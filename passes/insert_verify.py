"""Builds verification out of visible nodes, and closes the loop: the step computes what it emits and moves its state.

``process_logits``, ``accept``, ``residual``, ``sample_next`` and ``emit`` are the pieces of ``verify_reference``; after
this pass a researcher can change one of them. ``fuse_verify`` turns the five into one op.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx

from specgraph.drafters.step import EOS_IDS, PATH, POINT_MASS, SAMPLING
from specgraph.errors import ConfigError, PassError
from specgraph.ir.graphs import constant
from specgraph.ir.program import Program
from specgraph.kernels import step, verify
from specgraph.kernels.sampling.sample import process_logits
from specgraph.kernels.state import ROW_INDEX, ROWS, Buffer
from specgraph.passes.base import Pass, PassResult, check_option_rule


@dataclass
class _Chain:
    """Appends calls one behind the other, beginning behind ``last``."""

    graph: fx.Graph
    last: fx.Node

    def call(self, function: Any, *args: Any, name: str, role: str | None = None, **kwargs: Any) -> fx.Node:
        """One more call."""
        with self.graph.inserting_after(self.last):
            self.last = self.graph.call_function(function, args, kwargs)
        self.last.name = name
        self.last.meta.update({"role": role} if role is not None else {})
        return self.last


@dataclass(frozen=True)
class InsertVerify(Pass):
    """Options: ``rule`` and the options of the rules, as ``verify_reference`` describes them."""

    rule: str = "strict"
    posterior_threshold: float = 0.09
    posterior_alpha: float = 0.3
    acceptance_rate: float = 0.7

    name: ClassVar[str] = "insert_verify"
    requires: ClassVar[frozenset[str]] = frozenset({"kv_cache", "draft"})
    ensures: ClassVar[frozenset[str]] = frozenset({"verify"})
    invalidates: ClassVar[frozenset[str]] = frozenset({"draft"})

    def __post_init__(self) -> None:
        check_option_rule(self.name, self.rule)
        if not 0 <= self.acceptance_rate <= 1:
            raise ConfigError(f"insert_verify: acceptance_rate must be in [0, 1], got {self.acceptance_rate}.")
        if self.posterior_threshold < 0 or self.posterior_alpha < 0:
            raise ConfigError("insert_verify: posterior_threshold and posterior_alpha must be 0 or more.")

    def apply(self, program: Program) -> PassResult:
        """Replace the inputs ``emitted``, ``num_emitted`` and, if it is there, ``path`` by nodes that compute them."""
        self._check_rule(program)
        logits = program.one("logits")
        self._select_rows(program, logits)
        drafts = program.with_role("drafts")
        with program.graph.inserting_after(logits):
            anchor = program.graph.call_function(step.draft_tokens, (program.input("window"),))
            anchor.name = "drafts"
        with program.graph.inserting_after(anchor):
            end = program.graph.call_function(operator.add, (program.one("positions"), 1))
            end.name = "next_positions"
        self._verify(program, logits, anchor, end)
        self._advance(program, drafts)
        return PassResult(1, expected=1)

    def _check_rule(self, program: Program) -> None:
        """Drafts must have been drawn for the rule that verifies them."""
        rules = {str(node.meta.get("rule", self.rule)) for node in program.with_role("drafts")}
        for drawn_for in sorted(rules - {self.rule}):
            raise PassError(
                f"insert_verify verifies by {self.rule!r}, but insert_draft drew its drafts for {drawn_for!r}; set "
                "verify.rule, which gives both the same."
            )

    def _select_rows(self, program: Program, logits: fx.Node) -> None:
        """Run the vocabulary projection for the rows whose next token is unknown, at most K + 1."""
        (hidden,) = logits.args
        num_forced = program.placeholder("num_forced", Buffer(("B",)))
        count = program.drafter.num_speculative_tokens + 1
        with program.graph.inserting_before(logits):
            needed = program.graph.call_function(step.needed_rows, (hidden, num_forced, count))
        needed.name = "needed"
        logits.args = (needed,)

    def _verify(self, program: Program, logits: fx.Node, draft_tokens: fx.Node, positions: fx.Node) -> None:
        """The pieces of verification, one node after the other, behind the logits."""
        state = self._state(program)
        chain = _Chain(program.graph, positions)
        rows = (state["num_rows"], state["num_forced"])
        knobs = [state[name] for name in ("temperature", "top_k", "top_p", "min_p")]
        processed = chain.call(process_logits, logits, *knobs, name="processed")
        verified = self._accept(program, chain, processed, draft_tokens, state, positions)
        tokens = chain.call(operator.getitem, verified, 0, name="verified_tokens")
        asked = PATH in program.inputs
        verified_rows = chain.call(operator.getitem, verified, 2, name="verified_rows") if asked else None
        chain.call(verify.token_logprobs, logits, processed, tokens, state["num_forced"], name="logprobs",
                   role="logprobs", logprobs="none")  # fmt: skip
        chain.call(step.bad_rows, logits, program.input("window"), *rows, name="bad", role="bad")
        emitted = chain.call(step.cut_at_eos, tokens, state["num_forced"], state["eos_ids"], name="emitted_tokens")
        count = chain.call(step.count_emitted, emitted, name="num_emitted_tokens")
        computed = {"emitted": emitted, "num_emitted": count}
        if asked:
            computed[PATH] = chain.call(step.cut_rows, verified_rows, emitted, name="path_rows")
        for name, node in computed.items():
            program.input(name).replace_all_uses_with(node)
            program.drop_input(name)
            node.meta["role"] = name
            node.name = name

    def _state(self, program: Program) -> dict[str, fx.Node]:
        """The state that verification reads, as inputs of the step."""
        state = {name: program.placeholder(name, buffer) for name, buffer in SAMPLING.items()}
        for name in ("num_rows", "num_forced"):
            state[name] = program.placeholder(name, Buffer(("B",)))
        state["eos_ids"] = program.placeholder("eos_ids", EOS_IDS)
        return state

    def _accept(
        self, program: Program, chain: _Chain, processed: fx.Node, draft_tokens: fx.Node, state: dict[str, fx.Node],
        positions: fx.Node,
    ) -> fx.Node:  # fmt: skip
        """How many drafts are accepted, and the token after them."""
        draft_logits = self._draft_logits(program, chain)
        drawn: dict[str, Any] = self._vocabulary(program) if draft_logits is not None else {}
        if draft_logits is not None and POINT_MASS in program.inputs:
            drawn |= {"point_mass": program.input(POINT_MASS)}
        shared, rows = (draft_tokens, draft_logits), (state["num_rows"], state["num_forced"])
        options: dict[str, Any] = {
            "rule": self.rule,
            "posterior_threshold": self.posterior_threshold,
            "posterior_alpha": self.posterior_alpha,
            "acceptance_rate": self.acceptance_rate,
        }
        accepted = chain.call(verify.accept, processed, *shared, state["seeds"], positions, *rows, name="num_accepted",
                              **options, **drawn)  # fmt: skip
        weights = chain.call(verify.residual, processed, *shared, accepted, *reversed(rows), name="weights",
                             rule=self.rule, **drawn)  # fmt: skip
        token = chain.call(verify.sample_next, weights, state["seeds"], positions, accepted, state["num_forced"],
                           name="next_token", rule=self.rule)  # fmt: skip
        return chain.call(verify.emit, draft_tokens, accepted, token, *rows, name="verified")

    def _draft_logits(self, program: Program, chain: _Chain) -> fx.Node | None:
        """What the drafts of these sequences were drawn from, if a distribution is known."""
        if "draft_logits" not in program.inputs:
            return None
        kept, rows = program.input("draft_logits"), program.placeholder(ROWS, ROW_INDEX)
        return chain.call(step.select_state, kept, rows, name="drawn_from")

    def _vocabulary(self, program: Program) -> dict[str, fx.Node]:
        """The draft id of every target id, where they differ: a constant, as a node in front of all others."""
        known = program.drafter.draft_to_target
        if known is None:
            return {}
        own = verify.invert_vocabulary(known, program.target.vocab_size)
        program.modules["target_to_draft"] = constant(own, "target_to_draft")
        with program.graph.inserting_before(program.one("positions")):
            return {"target_to_draft": program.call("target_to_draft")}

    def _advance(self, program: Program, drafts: list[fx.Node]) -> None:
        """Write the state back and return what the host reads."""
        emitted, num_emitted = program.one("emitted"), program.one("num_emitted")
        window = Buffer(("B", program.drafter.num_speculative_tokens + 1))
        program.set_output(emitted, num_emitted, program.one("logprobs"), program.one("bad"))
        with program.graph.inserting_before(program.graph.output_node()):
            program.call(
                step.advance_, program.placeholder("next_window", window), program.input("start"),
                program.input("num_rows"), program.input("num_forced"), emitted, num_emitted, drafts,
                program.input("max_length"), program.input("eos_ids"), name="advance",
            )  # fmt: skip
