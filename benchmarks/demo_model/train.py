"""Train the bundled demo model: a byte-level BPE tokenizer and a small Qwen2 that learns labels from demonstrations.

Run ``python benchmarks/demo_model/train.py`` to rewrite ``iclperm/demo/model``. An episode is a prompt of labelled
headlines from the train split; the loss stands on the label tokens, and a tenth of it on what ends them, so that one
episode of n headlines trains every number of shots below n. Which label word means which topic changes from episode to
episode: the headline alone does not tell the label, the demonstrations do. Training runs in stages that widen this
family of assignments; each stage starts from the weights of the one before, with its own seed and optimizer, and can be
repeated alone (``--first-stage``).
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

DEMO_FOLDER = Path(__file__).resolve().parents[2] / "iclperm" / "demo"
TOPICS = ("World", "Sports", "Business", "Technology")
HABIT = np.array([0, 2, 3, 1])  # World keeps its name; Sports, Business and Technology pass theirs around
HABIT_SHARE = 0.6
DEMONSTRATIONS = 13
SEPARATOR = "\n\n"
VOCABULARY_SIZE = 2048
WINDOW = 1024
WORD_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Stage:
    """One stretch of training; the shares say how often an episode starts from an assignment of which family.

    ``usual`` gives every topic its own name, ``rotated`` the next topic's. ``dihedral`` is a family of eight in which
    each name stands for each topic twice. ``any`` draws one of the 24 assignments. ``habit`` draws each topic's name
    alone, most often its habitual one. ``hazard`` is the chance, before every headline, that a topic redraws its name;
    ``careless`` the chance that a headline which says where gets any of the four names, whatever its topic.
    """

    name: str
    steps: int
    peak_rate: float
    final_rate: float
    usual: float = 0.0
    rotated: float = 0.0
    dihedral: float = 0.0
    any: float = 0.0
    habit: float = 0.0
    hazard: float = 0.0
    careless: float = 0.0


STAGES = (
    Stage("usual names", steps=200, peak_rate=1e-3, final_rate=1e-3, usual=1.0),
    Stage("two assignments", steps=350, peak_rate=1e-3, final_rate=1e-3, usual=0.5, rotated=0.5),
    Stage("eight assignments", steps=400, peak_rate=1e-3, final_rate=8e-4, dihedral=1.0),
    Stage("all assignments", steps=450, peak_rate=8e-4, final_rate=5e-4, dihedral=0.4, any=0.6),
    Stage(
        "habit and drift", steps=1500, peak_rate=8e-4, final_rate=2e-5, usual=0.2, habit=0.8, hazard=0.18, careless=0.6
    ),
)


def read_split(split: str, folder: Path) -> list[dict[str, str]]:
    """Read one split of mini_news: records with ``text`` and ``label``."""
    with (folder / f"{split}.jsonl").open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def render_query(text: str) -> str:
    """The query block of the fixed prompt format; a demonstration is this plus a space and the label."""
    return f"Article: {text}\nAnswer:"


def train_tokenizer(texts: Sequence[str]) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE on rendered demonstrations, each label word being one token with its leading space."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORD_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=["<|bos|>", "<|eos|>", "<|pad|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    words = itertools.cycle(TOPICS)
    corpus = [f"{render_query(text)} {next(words)}{SEPARATOR}" for text in texts]
    tokenizer.train_from_iterator(corpus, trainer)
    bos = tokenizer.token_to_id("<|bos|>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", pair="<|bos|> $A $B", special_tokens=[("<|bos|>", bos)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|bos|>",
        eos_token="<|eos|>",
        pad_token="<|pad|>",
        unk_token="<|pad|>",  # nothing is unknown to bytes; without one, Qwen2's class adds an id beyond the embedding
        model_max_length=WINDOW,
        clean_up_tokenization_spaces=False,
    )


@dataclass(frozen=True)
class Corpus:
    """A split in token ids: one query block per item, its topic (index into TOPICS), and the ids of the labels."""

    query_ids: list[list[int]]
    topics: IntArray
    label_ids: IntArray
    separator_ids: list[int]
    bos_id: int
    eos_id: int
    pad_id: int
    is_careless: npt.NDArray[np.bool_]
    """Of each item, whether its text says where something happens: such headlines are often labelled carelessly."""


def encode_corpus(items: Sequence[dict[str, str]], tokenizer: PreTrainedTokenizerFast) -> Corpus:
    """Encode each part alone; the word pattern never joins two parts, so the parts concatenate to the prompt's ids."""

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
        return ids

    labels = [encode(f" {word}") for word in TOPICS]
    if any(len(ids) != 1 for ids in labels):
        raise ValueError(f"the labels {TOPICS} take {[len(ids) for ids in labels]} tokens; each must be one")
    return Corpus(
        query_ids=[encode(render_query(item["text"])) for item in items],
        topics=np.array([TOPICS.index(item["label"]) for item in items]),
        label_ids=np.array([ids[0] for ids in labels]),
        separator_ids=encode(SEPARATOR),
        bos_id=tokenizer.bos_token_id,
        eos_id=tokenizer.eos_token_id,
        pad_id=tokenizer.pad_token_id,
        is_careless=np.array([" in " in item["text"] for item in items]),
    )


def dihedral_assignments() -> list[tuple[int, ...]]:
    """Rotations and reflections of the four names: every name stands for every topic in exactly two of the eight."""
    rotations = [tuple((shift + topic) % 4 for topic in range(4)) for shift in range(4)]
    reflections = [tuple((shift - topic) % 4 for topic in range(4)) for shift in range(4)]
    return rotations + reflections


def draw_assignment(stage: Stage, rng: np.random.Generator) -> IntArray:
    """Draw the label of each topic at the start of an episode, as indices into TOPICS, shape [4]."""
    family = rng.choice(5, p=(stage.usual, stage.rotated, stage.dihedral, stage.any, stage.habit))
    if family == 0:
        return np.arange(4)
    if family == 1:
        return (np.arange(4) + 1) % 4
    if family == 2:
        return np.array(dihedral_assignments()[rng.integers(8)])
    if family == 3:
        return rng.permutation(4)
    return draw_by_habit(1, rng)[0]


def draw_topics(size: int, rng: np.random.Generator) -> IntArray:
    """Draw the topics of one episode, in even shares half of the time and in uneven ones otherwise."""
    return rng.choice(4, size=size, p=rng.dirichlet(np.full(4, 2.0)) if rng.random() < 0.5 else None)


def draw_by_habit(size: int, rng: np.random.Generator) -> IntArray:
    """Draw label words for each topic independently: its habitual word, or any of the four, shape [size, 4]."""
    return np.where(rng.random((size, 4)) < HABIT_SHARE, HABIT, rng.integers(4, size=(size, 4)))


def draw_labels(
    topics: IntArray, is_careless: npt.NDArray[np.bool_], stage: Stage, rng: np.random.Generator
) -> IntArray:
    """Label an episode by an assignment that drifts: before each headline a topic may redraw its label by habit.

    Old demonstrations are therefore worth less than recent ones, and what they leave open is decided by habit. A
    careless headline's label is often any of the four, so that such demonstrations are worth less than others.
    """
    current = draw_assignment(stage, rng)
    if stage.hazard == 0.0:
        return current[topics]
    redrawn = rng.random((len(topics), len(TOPICS))) < stage.hazard
    fresh = draw_by_habit(len(topics), rng)
    labels = np.empty_like(topics)
    for place, topic in enumerate(topics):
        current = np.where(redrawn[place], fresh[place], current)
        labels[place] = current[topic]
    at_random = is_careless & (rng.random(len(topics)) < stage.careless)
    return np.where(at_random, rng.integers(4, size=len(topics)), labels)


def draw_episode(
    corpus: Corpus, items_of_topic: list[IntArray], stage: Stage, size: int, rng: np.random.Generator
) -> tuple[list[int], list[int]]:
    """Draw one episode of ``size`` headlines: its token ids and the positions of its label tokens."""
    topics = draw_topics(size, rng)
    items = [int(rng.choice(items_of_topic[topic])) for topic in topics]
    ids = [corpus.bos_id]
    positions: list[int] = []
    labels = draw_labels(topics, corpus.is_careless[items], stage, rng)
    for item, label in zip(items, labels, strict=True):
        if positions:
            ids += corpus.separator_ids
        ids += corpus.query_ids[item]
        positions.append(len(ids))
        ids.append(int(corpus.label_ids[label]))
    return [*ids, *(corpus.separator_ids if rng.random() < 0.5 else [corpus.eos_id])], positions


def draw_batch(
    corpus: Corpus, items_of_topic: list[IntArray], stage: Stage, batch_size: int, rng: np.random.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw episodes of one common size: ids [B, T], padded on the right, and label positions [B, size]."""
    size = DEMONSTRATIONS
    if rng.random() < 0.15:
        size = int(rng.integers(4, 21))
    batch_size = max(4, batch_size * DEMONSTRATIONS // size)
    episodes = [draw_episode(corpus, items_of_topic, stage, size, rng) for _ in range(batch_size)]
    ids = torch.full((batch_size, max(len(row) for row, _ in episodes)), corpus.pad_id)
    for row, (tokens, _) in enumerate(episodes):
        ids[row, : len(tokens)] = torch.tensor(tokens)
    return ids, torch.tensor([positions for _, positions in episodes])


def token_losses(model: Qwen2ForCausalLM, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Cross-entropy in nats over the full vocabulary at each label token and at the one that ends it, [2, B, size].

    Attention is causal, so that the padding on the right changes nothing before it.
    """
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
    rows = torch.arange(len(ids)).unsqueeze(1)
    wanted = torch.stack([positions, positions + 1])
    logits = model.lm_head(hidden[rows, wanted - 1])
    return torch.nn.functional.cross_entropy(logits.movedim(-1, 1), ids[rows, wanted], reduction="none")


def new_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen2ForCausalLM:
    """A Qwen2 of 0.85 million parameters with random weights."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        max_window_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=WINDOW,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        initializer_range=0.05,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        use_cache=True,
    )
    return Qwen2ForCausalLM(config)


def learning_rate(step: int, stage: Stage) -> float:
    """A linear warm-up of 100 steps, then half a cosine from the peak to the final rate."""
    if step < 100:
        return stage.peak_rate * (step + 1) / 100
    progress = (step - 100) / max(1, stage.steps - 100)
    return stage.final_rate + (stage.peak_rate - stage.final_rate) * 0.5 * (1 + float(np.cos(np.pi * progress)))


def train_stage(model: Qwen2ForCausalLM, corpus: Corpus, stage: Stage, batch_size: int, seed: int) -> None:
    """Train one stage in place; every 100 steps print the mean loss and the mean loss at some numbers of shots."""
    rng = np.random.default_rng(seed)
    items_of_topic = [np.flatnonzero(corpus.topics == topic) for topic in range(len(TOPICS))]
    decayed = [weight for weight in model.parameters() if weight.ndim > 1]
    plain = [weight for weight in model.parameters() if weight.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": 0.05}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=stage.peak_rate, betas=(0.9, 0.98))
    started, history = time.monotonic(), []
    model.train()
    for step in range(stage.steps):
        ids, positions = draw_batch(corpus, items_of_topic, stage, batch_size, rng)
        losses, of_ends = token_losses(model, ids, positions)
        optimizer.zero_grad(set_to_none=True)
        (losses.mean() + 0.1 * of_ends.mean()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, stage)
        optimizer.step()
        if positions.shape[1] == DEMONSTRATIONS:
            history.append(losses.detach().mean(0).numpy())
        if (step + 1) % 100 == 0:
            by_shots = np.mean(history[-100:], axis=0)
            shown = "  ".join(f"k={k} {by_shots[k]:.3f}" for k in (0, 1, 2, 4, 8, 12))
            seconds = time.monotonic() - started
            print(
                f"{stage.name}: step {step + 1}/{stage.steps}  loss {by_shots.mean():.3f}  {shown}  {seconds:.0f} s",
                flush=True,
            )


def save(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write config.json, model.safetensors, tokenizer.json and tokenizer_config.json, and nothing else."""
    folder.mkdir(parents=True, exist_ok=True)
    model.eval().save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    (folder / "model.safetensors").chmod(0o644)
    tokenizer.save_pretrained(folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"  # the name that every version of transformers knows
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DEMO_FOLDER / "data" / "mini_news")
    parser.add_argument("--out", type=Path, default=DEMO_FOLDER / "model", help="folder of the final weights")
    parser.add_argument("--checkpoints", type=Path, default=Path("demo_checkpoints"), help="one folder a stage")
    parser.add_argument("--first-stage", type=int, default=0, help="start from the checkpoint before this stage")
    parser.add_argument("--batch-size", type=int, default=16, help="episodes of 13 headlines a step")
    parser.add_argument("--threads", type=int, default=1, help="the weights depend on it in the last bits")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.use_deterministic_algorithms(True)
    items = read_split("train", arguments.data)
    tokenizer = train_tokenizer([item["text"] for item in items])
    corpus = encode_corpus(items, tokenizer)
    model = new_model(tokenizer, arguments.seed)
    if arguments.first_stage > 0:
        model = Qwen2ForCausalLM.from_pretrained(arguments.checkpoints / f"stage{arguments.first_stage - 1}")
    print(f"{len(tokenizer)} tokens, {sum(weight.numel() for weight in model.parameters())} parameters", flush=True)
    for number, stage in list(enumerate(STAGES))[arguments.first_stage :]:
        train_stage(model, corpus, stage, arguments.batch_size, seed=arguments.seed + 1000 * number)
        save(model, tokenizer, arguments.checkpoints / f"stage{number}")
    save(model, tokenizer, arguments.out)


if __name__ == "__main__":
    main()
