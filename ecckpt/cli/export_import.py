"""``ecckpt export`` and ``ecckpt import``: folders of safetensors or DCP (docs/EXPORT.md)."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from ecckpt.cli.argument_types import size_of, tie_of
from ecckpt.client.config import NodeConfig, read_token
from ecckpt.errors import InvalidConfig

if TYPE_CHECKING:
    from ecckpt.client.read.open import Opened
    from ecckpt.integrations.dcp.export import ExportedDcp
    from ecckpt.integrations.safetensors.export import Exported
    from ecckpt.integrations.safetensors.importer import Imported


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommands to the parser."""
    node = NodeConfig.from_environment()
    export = commands.add_parser("export", help="write a checkpoint as a folder for other programs")
    export.add_argument("run")
    export.add_argument("agents", nargs="+", metavar="HOST:PORT", help="agents of all its nodes")
    export.add_argument(
        "--to",
        nargs=2,
        required=True,
        metavar=("FORMAT", "DIR"),
        help="safetensors: for Hugging Face's tools; dcp: for torch.distributed.checkpoint; "
        "DIR must be new or empty",
    )
    export.add_argument("--step", type=int, help="export this step (default: the newest)")
    export.add_argument(
        "--prefix",
        help="export names with this prefix, without it (default: model. for safetensors, none "
        "for dcp)",
    )
    export.add_argument(
        "--rank", type=int, help="use this rank's copy of tensors that differ between ranks"
    )
    export.add_argument(
        "--max-shard-bytes",
        type=size_of,
        default="5GB",
        metavar="SIZE",
        help="size of a safetensors file (default: 5GB)",
    )
    export.add_argument("--token-file", type=Path, default=node.token_file)
    export.add_argument("--json", action="store_true")
    export.set_defaults(act=_export)
    importing = commands.add_parser("import", help="save a folder of safetensors or DCP as a run")
    importing.add_argument("run")
    importing.add_argument("folder", type=Path, metavar="DIR")
    importing.add_argument(
        "--root", type=Path, default=node.root, help="folder of this node's agent"
    )
    importing.add_argument(
        "--agents",
        nargs="*",
        default=[],
        metavar="HOST:PORT",
        help="further agents, which hold fragments",
    )
    importing.add_argument("--step", type=int, default=0, help="training step of the checkpoint")
    importing.add_argument(
        "--tie",
        type=tie_of,
        nargs="*",
        default=[],
        metavar="NAME=STORED",
        help="names of tied tensors that the folder does not have, each with a name that it has "
        "(lm_head.weight=model.embed_tokens.weight)",
    )
    importing.add_argument("--json", action="store_true")
    importing.set_defaults(act=_import)


def _export(arguments: argparse.Namespace) -> int:
    kind, folder = arguments.to
    if kind not in ("safetensors", "dcp"):
        raise InvalidConfig(f"--to {kind}: unknown format", hint="use safetensors or dcp")
    from ecckpt.client.read.open import open as open_run

    token = read_token(arguments.token_file)
    opened = open_run(arguments.run, arguments.agents, step=arguments.step, token=token)
    if arguments.rank is not None:
        opened = opened.as_rank(arguments.rank)
    done = _export_to(kind, opened, Path(folder), arguments)
    if arguments.json:
        print(json.dumps(asdict(done)))
    else:
        print(
            f"{done.tensors} tensors, {done.total_bytes:,} bytes "
            f"of generation {done.generation}: {done.folder}"
        )
    return 0


def _export_to(
    kind: str, opened: Opened, folder: Path, arguments: argparse.Namespace
) -> Exported | ExportedDcp:
    if kind == "dcp":
        from ecckpt.integrations.dcp.export import export_dcp

        return export_dcp(opened, folder, prefix=arguments.prefix or "")
    from ecckpt.integrations.safetensors.export import export_safetensors

    return export_safetensors(
        opened,
        folder,
        prefix="model." if arguments.prefix is None else arguments.prefix,
        max_file_bytes=arguments.max_shard_bytes,
    )


def _import(arguments: argparse.Namespace) -> int:
    done = _import_from(arguments)
    if arguments.json:
        print(json.dumps(asdict(done)))
    else:
        print(
            f"{done.tensors} tensors, {done.total_bytes:,} bytes as generation {done.generation} "
            f"of run {done.run}: {done.promise}"
        )
    return 0


def _import_from(arguments: argparse.Namespace) -> Imported:
    run, folder, ties = arguments.run, arguments.folder, dict(arguments.tie)
    root, agents, step = arguments.root, arguments.agents, arguments.step
    if not (folder / ".metadata").exists():  # DCP's
        from ecckpt.integrations.safetensors.importer import import_safetensors

        return import_safetensors(run, folder, root=root, agents=agents, step=step, ties=ties)
    if ties:
        raise InvalidConfig("--tie is not for DCP's folders, which have all names")
    from ecckpt.integrations.dcp.importer import import_dcp

    return import_dcp(run, folder, root=root, agents=agents, step=step)
