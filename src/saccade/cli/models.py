"""`saccade list` shows the models on this machine; `saccade pull` fetches one from the hub."""

from argparse import Namespace
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from saccade import bundled
from saccade.cli.parser import Parser, settings_from
from saccade.config import setting
from saccade.errors import ConfigError
from saccade.models.folder import find_model
from saccade.terminal import Output, print_json, print_table

BUNDLED = "(bundled)"


@dataclass(frozen=True, kw_only=True, slots=True)
class ListSettings:
    """Where to look for models."""

    download_dir: str = setting("", "folder with models from the hub; by default the hub's own cache")
    json: bool = setting(False, "print JSON")


@dataclass(frozen=True, kw_only=True, slots=True)
class PullSettings:
    """What to fetch, and where to put it."""

    revision: str = setting("", "branch, tag or commit")
    download_dir: str = setting("", "folder for models from the hub; by default the hub's own cache")


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model on this machine. `problem` says why it cannot be served, and is empty if it can."""

    name: str
    architecture: str
    num_bytes: int
    folder: str
    problem: str


def new_parser(name: str) -> Parser:
    if name == "list":
        about = "List the models on this machine: their size, their family, and whether they can be served."
        parser = Parser(name, about=about)
        parser.add_settings(ListSettings)
        return parser
    about = (
        "Fetch the needed files of a model into the hub's cache: safetensors, tokenizer and settings, never code. "
        "An unsupported family is refused before its weights are fetched."
    )
    parser = Parser(name, words="NAME", max_words=1, about=about)
    parser.add_settings(PullSettings)
    return parser


def run(flags: Namespace) -> int:
    return _list(settings_from(flags, ListSettings)) if flags.command == "list" else _pull(flags)


def _list(asked: ListSettings) -> int:
    console = Output()
    with Console(stderr=True).status("looking for models"):
        found = list(local_models(asked.download_dir))
    if asked.json:
        print_json([asdict(model) for model in found])
        return 0
    table = Table("model", "family", "size", "can be served")
    for model in found:
        table.add_row(model.name, model.architecture, size_text(model.num_bytes), model.problem or "yes")
    print_table(console, table)
    return 0


def local_models(download_dir: str = "") -> Iterator[LocalModel]:
    """Yields the bundled model, then those in the hub's cache by name."""
    from huggingface_hub import CacheNotFound, scan_cache_dir

    folder = bundled.path()
    yield described(BUNDLED, folder, sum(file.stat().st_size for file in folder.iterdir()))
    try:
        repositories = scan_cache_dir(download_dir or None).repos
    except (CacheNotFound, ValueError, RuntimeError):  # nothing was fetched, the folder is a file, or there is no home
        return
    for repository in sorted(repositories, key=lambda one: one.repo_id):
        revisions = sorted(repository.revisions, key=lambda one: ("main" in one.refs, one.last_modified))
        if repository.repo_type == "model" and revisions:
            yield described(repository.repo_id, revisions[-1].snapshot_path, revisions[-1].size_on_disk)


def described(name: str, folder: Path, num_bytes: int) -> LocalModel:
    from saccade.models.model_config import Config
    from saccade.models.quantization import read_formats  # imports torch
    from saccade.models.registry import read_spec

    if not (folder / "config.json").is_file():
        return LocalModel(name, "", num_bytes, str(folder), "no: it has no config.json")
    architecture, problem = "", ""
    try:
        config = Config.read(folder / "config.json")
        named: list[str] = []
        architecture = ", ".join(map(str, config.get("architectures", named)))
        family, _ = read_spec(config)
        architecture = architecture or family.architecture
        read_formats(config, family.renames)
        if not any(folder.glob("*.safetensors")):
            problem = "no: its weights (*.safetensors) are missing"
    except ConfigError as error:
        problem = f"no: {str(error).removeprefix(f'{folder}/config.json: ').partition(' Supported: ')[0]}"
    return LocalModel(name, architecture, num_bytes, str(folder), problem)


def _pull(flags: Namespace) -> int:
    if not flags.words:
        raise ConfigError("no model was named: saccade pull org/name")
    name, asked, console = flags.words[0], settings_from(flags, PullSettings), Console(stderr=True)
    if Path(name).expanduser().is_dir():
        raise ConfigError(f"{name} is a local folder; there is nothing to fetch")
    folder = find_model(name, revision=asked.revision, download_dir=asked.download_dir)  # shows its own progress
    model = described(name, folder, sum(file.stat().st_size for file in folder.iterdir()))
    if model.problem:
        raise ConfigError(f"{name} was fetched but cannot be served: {model.problem.removeprefix('no: ')}")
    console.print(f"{name}: {size_text(model.num_bytes)} in {folder}", markup=False, highlight=False, soft_wrap=True)
    console.print(f"serve it: saccade serve {name}", markup=False, highlight=False)
    return 0


def size_text(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"
