"""A whole training run: it trains the tokenizer, the target and the draft, measures them, and writes a report."""

import json
import os
import platform
import time
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import torch
import transformers
from transformers import AutoTokenizer

from benchmarks.tiny_models.acceptance import AcceptanceReport, measure_acceptance
from benchmarks.tiny_models.config import TrainConfig, check_config, check_paths
from benchmarks.tiny_models.documents import encode_documents, format_document, in_order
from benchmarks.tiny_models.loop import StageReport, cross_entropy, distillation, evaluate, optimise
from benchmarks.tiny_models.models import build_model, count_parameters, folder_bytes, load_model, save_model
from benchmarks.tiny_models.recurrent import fast_recurrence
from benchmarks.tiny_models.tokenizer import train_tokenizer
from specgraph.errors import ConfigError
from specgraph.training.data import (
    Document,
    Encoded,
    format_question,
    read_documents,
    shuffled,
    split_documents,
)
from specgraph.training.rollout import write_documents


@dataclass
class TrainReport:
    """The results of ``run_training``, which are also written to ``<output>/training_report.json``.

    ``draft`` and ``acceptance`` are None if no draft was trained, and what counts its texts and bytes is 0.
    """

    target: StageReport
    draft: StageReport | None
    acceptance: AcceptanceReport | None
    documents: int
    heldout: int
    rollout_documents: int
    vocab_size: int
    target_bytes: int
    draft_bytes: int
    seconds: float
    device: str
    versions: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [_stage_line("target", "cross-entropy", self.target, self.target_bytes)]
        if self.draft is not None and self.acceptance is not None:
            lines += [
                _stage_line("draft", "KL to the target", self.draft, self.draft_bytes),
                *_acceptance_lines(self.acceptance),
            ]
        return "\n".join([*lines, f"{self.seconds:.0f} s on {self.device}"])


@dataclass(frozen=True)
class _Data:
    """Tokenised documents. ``questions`` are the training questions as text; acceptance is measured on ``prompts``."""

    train: list[Encoded]
    heldout: list[Encoded]
    questions: list[str]
    prompts: list[list[int]]


def run_training(cfg: TrainConfig) -> TrainReport:
    """Train a target and its draft from a file of questions and answers, and measure the acceptance of the drafts.

    This writes ``<output>/target`` and ``<output>/draft`` (bf16 safetensors, configuration and tokenizer, which
    ``AutoModelForCausalLM`` and ``AutoTokenizer`` load) and ``<output>/training_report.json``. With
    ``cfg.target.checkpoint``, that target is used unchanged, and none is written. Progress is shown on standard error.
    All randomness follows from ``cfg.seed``, and the caller's random generators do not change.

    Raises:
        ConfigError: a setting is out of range.
        InputError: a data file is missing, empty or malformed.
    """
    check_config(cfg)
    check_paths(cfg)
    device = _device(cfg.device)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(cfg.seed)
        return _run(cfg, device)


def _run(cfg: TrainConfig, device: torch.device) -> TrainReport:
    start = time.monotonic()
    documents = read_documents(cfg.data)
    asked = read_documents(cfg.eval_data, "eval_data") if cfg.eval_data else []
    train, heldout = split_documents(documents, cfg.heldout, cfg.seed)
    tokenizer = _tokenizer(cfg, train)
    data = _encode(cfg, tokenizer, train, heldout, asked or heldout)

    target_folder = cfg.target.checkpoint or os.path.join(cfg.output, "target")
    trained = None if cfg.target.checkpoint else _pretrain(cfg, tokenizer, data, target_folder, device)
    target = load_model(target_folder, device)
    target_report = trained or _loaded_target(cfg, target, data, device)

    draft = _draft(cfg, tokenizer, target, data, device) if cfg.draft.enabled else _NO_DRAFT
    report = TrainReport(
        target=target_report,
        draft=draft.report,
        acceptance=draft.acceptance,
        documents=len(train),
        heldout=len(heldout),
        rollout_documents=draft.documents,
        vocab_size=len(tokenizer),
        target_bytes=folder_bytes(target_folder),
        draft_bytes=draft.bytes,
        seconds=round(time.monotonic() - start, 1),
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} CPU",
        versions={"torch": torch.__version__, "transformers": transformers.__version__},
    )
    with open(os.path.join(cfg.output, "training_report.json"), "w", encoding="utf-8") as file:
        json.dump(asdict(report), file, indent=1)
        file.write("\n")
    return report


class _Draft(NamedTuple):
    """The report of a run about its draft, with the number of texts that the target wrote for it."""

    report: StageReport | None
    acceptance: AcceptanceReport | None
    documents: int
    bytes: int


_NO_DRAFT = _Draft(None, None, 0, 0)


def _draft(cfg: TrainConfig, tokenizer: Any, target: Any, data: _Data, device: torch.device) -> _Draft:
    """Let the target write texts, train a draft on them, and measure the draft as it was saved."""
    written = write_documents(target, tokenizer, data.questions, cfg.draft.rollout)
    folder = os.path.join(cfg.output, "draft")
    report = _distil(cfg, tokenizer, target, data, written, folder, device)
    acceptance = measure_acceptance(target, load_model(folder, device), data.prompts, cfg.acceptance)
    return _Draft(report, acceptance, len(written), folder_bytes(folder))


def _tokenizer(cfg: TrainConfig, train: list[Document]) -> Any:
    if cfg.target.checkpoint:
        return AutoTokenizer.from_pretrained(cfg.target.checkpoint)
    models = [cfg.target.model, *([cfg.draft.model] if cfg.draft.enabled else [])]
    length = min(model.max_position_embeddings for model in models)
    return train_tokenizer(map(format_document, train), cfg.tokenizer.vocab_size, length)


def _encode(
    cfg: TrainConfig, tokenizer: Any, train: list[Document], heldout: list[Document], asked: list[Document]
) -> _Data:
    return _Data(
        train=encode_documents(train, tokenizer, cfg.max_length),
        heldout=encode_documents(heldout, tokenizer, cfg.max_length),
        questions=[document.question for document in train],
        prompts=tokenizer([format_question(document.question) for document in asked])["input_ids"],
    )


def _pretrain(cfg: TrainConfig, tokenizer: Any, data: _Data, folder: str, device: torch.device) -> StageReport:
    """Train a target and save it to ``folder``."""
    optim, pad_id = cfg.target.optim, tokenizer.pad_token_id
    target = build_model(cfg.target.model, tokenizer)
    batches = shuffled(data.train, optim.batch_size, pad_id, cfg.seed)
    heldout = in_order(data.heldout, optim.batch_size, pad_id)
    loss = cross_entropy(target, cfg.target.input_noise)
    with fast_recurrence(target):
        report = optimise("target", target.train(), loss, batches, heldout, optim, device)
    save_model(target, tokenizer, folder)
    return report


def _loaded_target(cfg: TrainConfig, target: Any, data: _Data, device: torch.device) -> StageReport:
    """The report about a target that was not trained here: its size and its held-out loss."""
    heldout = in_order(data.heldout, cfg.target.optim.batch_size, target.generation_config.pad_token_id)
    loss = evaluate(target, cross_entropy(target), heldout, device)
    return StageReport(parameters=count_parameters(target), heldout_loss=loss)


def _distil(
    cfg: TrainConfig,
    tokenizer: Any,
    target: Any,
    data: _Data,
    written: list[Encoded],
    folder: str,
    device: torch.device,
) -> StageReport:
    """Train a draft on the documents of the data and on those that the target wrote, and save it to ``folder``.

    The held-out loss is the KL divergence on the answers of the held-out documents.
    """
    optim, pad_id = cfg.draft.optim, tokenizer.pad_token_id
    draft = build_model(cfg.draft.model, tokenizer)
    batches = shuffled([*data.train, *written], optim.batch_size, pad_id, cfg.seed + 1, cfg.draft.question_weight)
    heldout = in_order(data.heldout, optim.batch_size, pad_id, 0.0)
    report = optimise("draft", draft.train(), distillation(draft, target), batches, heldout, optim, device)
    save_model(draft, tokenizer, folder)
    return report


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device={name!r} is not a device: use auto, cpu or cuda.") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device={name}: no CUDA device is available; use device=cpu or device=auto.")
    return device


def _acceptance_lines(measured: AcceptanceReport) -> list[str]:
    return [
        f"greedy, {measured.questions} questions, K={measured.num_speculative_tokens}: "
        f"agreement {measured.agreement:.3f}, "
        f"acceptance length {measured.acceptance_length:.3f} ± {measured.standard_error:.3f}",
        "accepted per position: " + " ".join(f"{share:.3f}" for share in measured.per_position),
    ]


def _stage_line(name: str, loss: str, stage: StageReport, size: int) -> str:
    how = f"{stage.steps} steps in {stage.seconds:.0f} s (best: {stage.best_step})" if stage.steps else "loaded"
    return (
        f"{name}: {stage.parameters / 1e6:.2f}M parameters, {size / 1e6:.2f} MB, {how}, "
        f"held-out {loss} {stage.heldout_loss:.4f} nats/token"
    )
