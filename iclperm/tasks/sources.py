"""Where a task's rows come from: files, a folder, a data set of the Hugging Face Hub, or a share of the train split."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from glob import has_magic
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PrivateAttr, field_validator, model_validator

from iclperm.base.files import Folder, matches
from iclperm.errors import ConfigError, DataError, RunError, is_out_of_memory
from iclperm.study.choices import Choices
from iclperm.tasks.loaders import SUFFIXES, Row, TextForm, arrow_rows, checked, missing_column, read_rows
from iclperm.tasks.published import FORMS, Split, places_of

Word = Annotated[str, Field(min_length=1, max_length=1_000)]
Files = Word | Annotated[list[Word], Field(min_length=1)]
Rows = Annotated[list[dict[str, Any]], Field(min_length=1, max_length=10_000)]

# What a split's files may be called.
_STEMS: dict[Split, tuple[str, ...]] = {"train": ("train",), "test": ("test",), "dev": ("dev", "validation", "valid")}
_COMMIT = re.compile(r"[0-9a-f]{40}")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_SECONDS_FOR_THE_HUB = 5
_SHARD = re.compile(r".*-\d+-of-0*(\d+)\b.*")
_SHARE_OF_TEST = re.compile(r"(\d*\.?\d+) of test")
_SHARES_OF_ONE: dict[str, Any] = {"test": 0.3, "dev": 0.2}
"""Of the rows of a single file."""


class Dataset(Choices):
    """Where the splits of a task are.

    Without ``dataset``, ``train``, ``test`` and ``dev`` name files relative to the task file: one, a list, or a pattern
    such as ``data/train-*.parquet``, read in sorted order. With ``dataset``, they name its splits, several joined by
    ``+``: with ``revision`` it is a data set of the Hugging Face Hub at that commit, without it a local folder laid out
    as there; ``config`` is its configuration, or a list that is read one after the other. ``test`` and ``dev`` may be a
    number between 0 and 1 instead, the share of train set aside, and ``dev`` may be ``0.2 of test``; ``train`` may be
    the rows themselves, as mappings. Of the rows only those are kept whose column ``choose`` holds one of ``keep``,
    where given. ``obtain`` says how to come by the files.

    Text files are UTF-8, or what their byte order mark says, unless ``encoding`` names another; ``delimiter`` stands
    between the columns of .csv and .tsv files, and ``columns`` are the names of those that have no line of names. With
    ``drop_blank`` rows are left out in which a column that the task uses is blank. With ``stratify`` shares are
    taken of every label by itself.
    """

    dataset: Word | None = None
    revision: Word | None = None
    config: Word | Annotated[list[Word], Field(min_length=1)] | None = None
    train: Files | Rows
    test: Files | float
    dev: Files | float | None = None
    choose: Word | None = None
    keep: Annotated[list[Word], Field(min_length=1)] | None = None
    obtain: Word | None = None
    encoding: Literal["utf-8", "utf-16", "cp1252", "latin-1"] | None = None
    delimiter: Literal[",", ";", "\t", "|"] | None = None
    columns: Annotated[list[Word], Field(min_length=1)] | None = None
    drop_blank: bool = False
    stratify: bool = False
    _published: str | None = PrivateAttr(None)  # the task in whose published form the files are
    _is_split_by_content: bool = PrivateAttr(False)

    @field_validator("revision")
    @classmethod
    def _pinned(cls, revision: str | None) -> str | None:
        if revision is not None and not _COMMIT.fullmatch(revision):
            raise ValueError(
                "give the 40 hexadecimal digits of a commit, because a branch or a tag may point to other data tomorrow"
            )
        return revision

    @field_validator("test", "dev")
    @classmethod
    def _some_of_train(cls, named: str | list[str] | float | None) -> str | list[str] | float | None:
        of_test = _SHARE_OF_TEST.fullmatch(named) if isinstance(named, str) else None
        if (isinstance(named, float) and not 0 < named < 1) or (of_test and not 0 < float(of_test[1]) < 1):
            raise ValueError("no share; give a share of train above 0 and below 1, or name a file")
        return named

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.dataset is None and (self.revision or self.config):
            raise ValueError("the keys 'revision' and 'config' belong to a 'dataset'; name it, or leave them out")
        splits = (None if self.holds_rows else self.train, self.test, self.dev)
        if self.dataset is not None and any(isinstance(name, list) for name in splits):
            raise ValueError("with 'dataset', 'train', 'test' and 'dev' name one split each; give no lists")
        if self.revision and not _HUB_NAME.fullmatch(self.dataset or ""):
            raise ValueError(f"the dataset {self.dataset!r} with a 'revision' must be a hub name such as owner/name")
        if self.keep is not None and self.choose is None:
            raise ValueError("the key 'keep' lists values of a column; name the column with the key 'choose'")
        if self._share_of_test and isinstance(self.test, float):
            raise ValueError("dev is a share of test, and test is a share of train; make dev a share of train")
        if self.part("train")[1] >= 1:
            raise ValueError(f"the shares test {self.test} and dev {self.dev} leave nothing of train; lower them")
        return self

    @property
    def holds_rows(self) -> bool:
        """Whether the demonstrations are rows that the task itself holds."""
        return isinstance(self.train, list) and isinstance(self.train[0], dict)

    @property
    def _share_of_test(self) -> float:
        shared = _SHARE_OF_TEST.fullmatch(self.dev) if isinstance(self.dev, str) else None
        return float(shared[1]) if shared else 0.0

    def part(self, split: Split) -> tuple[Split, float, float]:
        """The split whose files hold ``split``, and the bounds [begin, end) between which the content hashes of its
        rows lie, as fractions of all hashes; with ``stratify`` as ranks among those of a label."""
        after_test = self.test if isinstance(self.test, float) else 0.0
        after_dev = after_test + (self.dev if isinstance(self.dev, float) else 0.0)
        if split == "dev" and self._share_of_test:
            return "test", 0.0, self._share_of_test
        if split == "train" or self.is_share(split):
            bounds = {"test": (0.0, after_test), "dev": (after_test, after_dev), "train": (after_dev, 1.0)}[split]
            return "train", *bounds
        return split, self._share_of_test if split == "test" else 0.0, 1.0

    def is_share(self, split: Split) -> bool:
        """Whether a split is a share of another."""
        return isinstance(getattr(self, split), float) or (split == "dev" and self._share_of_test > 0)

    @property
    def notes(self) -> list[str]:
        """What was decided about the files and should be known, in a line each."""
        if not self._is_split_by_content:
            return []
        test, dev = (_SHARES_OF_ONE[split] for split in ("test", "dev"))
        name = Path(str(self.train[0])).name
        return [
            f"the data are one file, {name}: its rows are split by their content into train ({1 - test - dev:.0%}), "
            f"test ({test:.0%}) and dev ({dev:.0%}), the same for every seed"
        ]

    def rows(self, folder: Path, split: Split, columns: Collection[str], optional: Collection[str] = ()) -> list[Row]:
        """The rows to keep of the files, or of the data set's split, that ``split`` names; paths are relative to
        ``folder``. Of the columns ``optional`` those are read, too, that are there."""
        named = getattr(self, split)
        if split == "train" and self.holds_rows:
            return checked("train", [(f"row {number} of 'train'", row) for number, row in enumerate(named, start=1)])
        if self.keep is None:
            return self._all_rows(folder, named, columns, optional)
        column, wanted = str(self.choose), set(self.keep)
        rows = self._all_rows(folder, named, dict.fromkeys((*columns, column)), optional)
        for place, row in rows:
            if column not in row:
                raise missing_column(place, column, row)
        there = {str(row[column]) for _, row in rows}
        if unknown := sorted(wanted - there):
            shown = ", ".join(sorted(there)[:100])
            raise DataError(f"the {split} data hold no {column} {unknown[0]!r}; there are {shown}")
        return [(place, row) for place, row in rows if str(row[column]) in wanted]

    def _all_rows(
        self, folder: Path, named: str | list[str], columns: Collection[str], optional: Collection[str]
    ) -> list[Row]:
        if self.dataset is not None:
            return [
                row
                for config in self.configs
                for row in _dataset_rows(self, folder, str(named), config, columns, optional)
            ]
        entries = named if isinstance(named, list) else [named]
        paths = dict.fromkeys(path for entry in entries for path in _matches(folder, entry, self.obtain))
        if self._published is not None:
            return [row for path in paths for row in FORMS[self._published].rows(path)]
        form = TextForm(self.encoding, self.delimiter, None if self.columns is None else tuple(self.columns))
        return [row for path in paths for row in read_rows(path, columns, form, optional)]

    @property
    def configs(self) -> list[str | None]:
        """The configurations to read, in order."""
        return [*self.config] if isinstance(self.config, list) else [self.config]


def found_in(folder: Path, declared: Dataset, task: str = "") -> Dataset:
    """The splits that a folder holds; a share that is declared stands in for a split.

    Of a built-in ``task`` also what its authors publish (`iclperm.tasks.published`). A single file, be it one of theirs
    that lies alone in a folder, is split by content.

    They are called ``train.csv`` and the like: ``validation`` and ``valid`` mean dev, ``train-*.parquet`` are the parts
    of one split, and a sub-folder ``data`` is looked into as well. Where there is no train, they may be called and laid
    out as in the data set that is declared. Raises `DataError` naming the folder and the split that it lacks or holds
    twice.
    """
    if folder.is_file():
        form = FORMS.get(task)
        is_theirs = form is not None and form.is_one(folder)
        if not is_theirs and folder.suffix not in SUFFIXES:
            theirs = "" if form is None else f", or the folder of {form.looked_for}"
            raise DataError(f"{folder}: cannot be read as data; give a {', '.join(SUFFIXES)} file{theirs}")
        alone: dict[str, Any] = {"train": declared.train, "test": [str(folder)]} if declared.holds_rows else {}
        return _with_form(alone or {"train": [str(folder)]}, declared, task if is_theirs else None)
    if not folder.is_dir():
        raise DataError(f"{folder}: is not a folder; give the folder that holds train.csv, test.csv and the like")
    if (published := _as_published(folder, declared, task)) is not None:
        return published
    places = [folder, folder / "data"]
    has_train = bool(_split_files(places, "train", _STEMS["train"]))
    files = None if has_train or declared.dataset is None else _published_files(places, declared)
    if files is None:
        files = {split: _split_files(places, split, stems) for split, stems in _STEMS.items()}
    found: dict[Split, Any] = {
        split: files[split] or (getattr(declared, split) if declared.is_share(split) else None) for split in _STEMS
    }
    if declared.holds_rows:
        found["train"] = declared.train
    for split in ("train", "test"):
        if found[split] is None:
            as_published = f", or the files of {declared.dataset} as they are there" if declared.dataset else ""
            if task in FORMS:
                as_published += f", or what its authors publish, {FORMS[task].looked_for}"
                there = (Path(path) for paths in files.values() for path in paths or ())
                if (other := next((path for path in there if not FORMS[task].is_one(path)), None)) is not None:
                    as_published += f", as which {other.name} here does not begin"
            raise DataError(
                f"{folder}: holds no {split} data; add {split}.csv, or another of {', '.join(SUFFIXES)}{as_published}; "
                "of one file alone make a task: iclperm tasks new --from FILE"
            )
    return _with_form(found, declared, None)


def _as_published(folder: Path, declared: Dataset, task: str) -> Dataset | None:
    """The files in a folder that a built-in task's authors publish; None where there are none."""
    if task not in FORMS:
        return None
    for place in places_of(task, folder):
        files = {split: [str(path) for path in paths] for split, paths in FORMS[task].find(place).items()}
        if not files:
            continue
        shares = {
            split: named
            for split in ("test", "dev")
            if declared.is_share(split) and (named := getattr(declared, split))
        }
        if "train" in files and ("test" in files or "test" in shares):
            return _with_form({**shares, **files}, declared, task)
        if len(files) == 1 and len(*files.values()) == 1:
            return _with_form({"train": files.popitem()[1]}, declared, task)
        there = next(iter(files))
        raise DataError(f"{place}: holds the {there} data alone of {FORMS[task].looked_for}; add the other")
    return None


def _with_form(found: dict[Any, Any], declared: Dataset, published: str | None) -> Dataset:
    """The files that were found, read as is declared; of one split without another, split by content."""
    form = declared.model_dump(include={"choose", "keep", "encoding", "delimiter", "columns", "drop_blank", "stratify"})
    is_alone = [*found] == ["train"]
    data = Dataset(**(found | _SHARES_OF_ONE if is_alone else found), **form)
    data._published, data._is_split_by_content = published, is_alone
    return data


def _published_files(places: list[Path], declared: Dataset) -> dict[Split, list[str]] | None:
    """The files of the splits as the declared data set names them; None where one is not there."""
    files: dict[Split, list[str]] = {split: [] for split in _STEMS}
    for split, config in product(_STEMS, declared.configs):
        named = getattr(declared, split)
        if named is None or declared.is_share(split) or (split == "train" and declared.holds_rows):
            continue
        of_config = [places[0] / config] if config else []
        for part in named.split("+"):
            found = _split_files(of_config if len(declared.configs) > 1 else of_config + places, split, (part,))
            if not found:
                return None
            files[split] += found
    return files


def _split_files(places: Iterable[Path], split: Split, stems: Collection[str]) -> list[str]:
    """The files of a split in the first place that has some; their names begin with one of ``stems``."""
    for place in places:
        paths = [place / name for name in Folder(place).names()] if place.is_dir() else []
        kinds: dict[tuple[str, str, bool], list[Path]] = {}
        for path in paths:
            stem, dash, _ = path.stem.partition("-")
            is_part = bool(dash) and path.suffix == ".parquet"
            if path.suffix in SUFFIXES and stem in stems and is_part == bool(dash) and path.is_file():
                kinds.setdefault((stem, path.suffix, is_part), []).append(path)
        if len(kinds) > 1:
            first, second = (files[0].name for files in list(kinds.values())[:2])
            raise DataError(f"{place}: both {first!r} and {second!r} may be the {split} data; keep one")
        for files in kinds.values():
            _refuse_missing_parts(place, split, files)
            return [str(path) for path in files]
    return []


def _refuse_missing_parts(place: Path, split: Split, files: list[Path]) -> None:
    numbered = (_SHARD.fullmatch(path.name) for path in files)
    for count in {int(match[1]) for match in numbered if match}:
        if len(files) != count:
            raise DataError(
                f"{place}: the {split} data has {len(files)} of its {count} parts ({files[0].name!r} is one); "
                "download the others, or remove what belongs to another version"
            )


def _matches(folder: Path, entry: str, obtain: str | None) -> list[Path]:
    is_there = (folder / entry).is_file()
    if obtain and not is_there:
        raise DataError(f"there is no {entry!r} in {folder}; {obtain}")
    if is_there or not has_magic(entry):
        return [folder / entry]
    try:
        paths = matches(folder, entry)
    except RunError as error:
        raise DataError(str(error)) from None
    if not paths:
        raise DataError(f"{folder / entry}: no file matches; repair the pattern under the task's 'data'")
    return paths


def _dataset_rows(
    data: Dataset, folder: Path, split: str, config: str | None, columns: Collection[str], optional: Collection[str]
) -> list[Row]:
    name = f"{data.dataset}[{split}]" if config is None else f"{data.dataset}[{config}, {split}]"
    found = _loaded(data, folder, split, config)
    for column in columns:
        if column not in found.column_names:
            raise missing_column(f"{name}:row 1", column, found.column_names)
    there = [column for column in found.column_names if column in columns or column in optional]
    table = found.select_columns(there).with_format("arrow")[:]
    return checked(name, arrow_rows(name, table))


def _loaded(data: Dataset, folder: Path, split: str, config: str | None) -> Any:
    """The split as a `datasets.Dataset`; raises `DataError` where the library or the data set cannot be had."""
    source = data.dataset if data.revision else str(folder / str(data.dataset))
    if not data.revision and not Path(str(source)).is_dir():
        raise ConfigError(
            f"the dataset {data.dataset!r} is no folder at {source}, and a hub name needs the key 'revision' under "
            "'data' (in a task file of lm-evaluation-harness under 'dataset_kwargs'), the commit to read, because a "
            "branch may point to other data tomorrow; or give a folder with --data"
        )
    try:
        import datasets
        from huggingface_hub.errors import HfHubHTTPError
    except ImportError:
        raise DataError(
            f"the dataset {data.dataset!r} is read with the datasets library; run: pip install 'iclperm[hf]', or "
            "download the files and give their folder with the study's key 'data'"
        ) from None
    unreachable: tuple[type[Exception], ...] = HfHubHTTPError.__bases__  # the errors of whichever HTTP library it uses
    reason = _why_out_of_reach(unreachable) if data.revision else None
    with _without_progress_bars(), _from_the_cache_alone() if reason else nullcontext():
        try:
            return datasets.load_dataset(source, name=config, split=split, revision=data.revision)
        except (*unreachable, OSError, ValueError, datasets.exceptions.DatasetsError) as error:
            for cause in (error, error.__cause__):  # the library's own error may hide it
                if cause is not None and is_out_of_memory(cause):
                    raise cause from None
            if reason is not None:
                raise DataError(
                    f"the split {split!r} of the dataset {data.dataset!r} is not in the cache, and the hub is out of "
                    f"reach ({reason}); go online, or give the folder of its files with --data (the study's key 'data')"
                ) from None
            raise DataError(
                f"the split {split!r} of the dataset {data.dataset!r} cannot be loaded "
                f"({type(error).__name__}: {' '.join(str(error).split())[:200]}); check its names, or download the "
                "files and give their folder with the study's key 'data'"
            ) from None


def _why_out_of_reach(unreachable: tuple[type[Exception], ...]) -> str | None:
    """Why the hub cannot be asked now, in a few words; None where it answers. Asks once, for seconds at most."""
    from huggingface_hub import constants, get_session

    failures: tuple[type[Exception], ...] = (*unreachable, OSError)
    try:
        get_session().head(constants.ENDPOINT, timeout=_SECONDS_FOR_THE_HUB)
    except failures as error:
        return "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else " ".join(str(error).split())[:100]
    return None


@contextmanager
def _from_the_cache_alone() -> Iterator[None]:
    """The datasets library reads its cache, and does not try the hub again and again; afterwards it is as it was."""
    from datasets import config

    before, config.HF_HUB_OFFLINE = config.HF_HUB_OFFLINE, True
    try:
        yield
    finally:
        config.HF_HUB_OFFLINE = before


@contextmanager
def _without_progress_bars() -> Iterator[None]:
    """Silences the progress bars of the two libraries, and lets them be as they were."""
    from datasets import utils as reading
    from huggingface_hub import utils as fetching

    silenced = [bars for bars in (reading, fetching) if not bars.are_progress_bars_disabled()]
    for bars in silenced:
        bars.disable_progress_bars()
    try:
        yield
    finally:
        for bars in silenced:
            bars.enable_progress_bars()
