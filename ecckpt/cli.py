"""The ``ecckpt`` command. Exit status: 0 fine, 1 degraded or not equal, 2 error."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ecckpt.config import NodeConfig, read_token
from ecckpt.errors import AgentUnreachable, EcckptError, InvalidConfig
from ecckpt.native import prefer

if TYPE_CHECKING:
    from ecckpt.exporting import Exported
    from ecckpt.importing import Imported
    from ecckpt.integrations.dcp_directory import ExportedDcp
    from ecckpt.opening import Opened


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    try:
        parsed = _parser().parse_args(arguments)
        status: int = parsed.act(parsed)
    except (EcckptError, OSError) as error:
        print(f"ecckpt: {type(error).__name__}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ecckpt", description="Erasure-coded checkpoints in the memory of the nodes that train"
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_agent(commands)
    _add_looks(commands)
    _add_trace(commands)
    _add_exchange(commands)
    _add_demo(commands)
    _add_simulate(commands)
    return parser


def _add_agent(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    node = NodeConfig.from_environment()
    agent = commands.add_parser("agent", help="run this node's agent, or --stop it")
    agent.add_argument("--root", type=Path, default=node.root, help="its folder, in a tmpfs")
    agent.add_argument("--node", default=node.node, help="the node's id, unique in the cluster")
    agent.add_argument("--domain", help="what it fails together with (default: only itself)")
    agent.add_argument("--listen", default=node.listen, metavar="HOST:PORT", help="for its peers")
    agent.add_argument("--token-file", type=Path, default=node.token_file, help="shared credential")
    agent.add_argument("--engine", default=node.engine, help="of the codec (default: the best one)")
    agent.add_argument(
        "--disk", type=Path, default=node.disk, help="folder on disk (default: none)"
    )
    agent.add_argument(
        "--scrub-mb-s",
        type=float,
        default=10.0,
        metavar="MB",
        help="how fast files on disk are checked, all the time (default: 10; 0: not)",
    )
    agent.add_argument("--cpus", default=node.cpus, help="to run on, such as 0-3,8 (default: all)")
    agent.add_argument("--nice", type=int, default=node.nice, help="0 to 19 (default: 0)")
    agent.add_argument(
        "--pull-mb-s",
        type=float,
        default=node.pull_mb_s,
        metavar="MB",
        help="how fast it takes fragments of its peers' saves (default: 0, no limit)",
    )
    agent.add_argument("--stop", action="store_true", help="end the agent that runs in --root")
    agent.set_defaults(act=_agent)


def _add_looks(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    node = NodeConfig.from_environment()
    status = commands.add_parser("status", help="what this node's agent holds")
    status.add_argument("--root", type=Path, default=node.root)
    status.add_argument("--json", action="store_true")
    status.set_defaults(act=_status)
    verify = commands.add_parser("verify", help="check every block that agents hold of a run")
    verify.add_argument("run")
    verify.add_argument("agents", nargs="*", metavar="HOST:PORT", help="(default: that of --root)")
    verify.add_argument("--root", type=Path, default=node.root)
    verify.add_argument(
        "--max-mb-s", type=float, default=0, metavar="MB", help="read by each agent"
    )
    verify.add_argument("--token-file", type=Path, default=node.token_file)
    verify.add_argument("--json", action="store_true")
    verify.set_defaults(act=_verify)
    repair = commands.add_parser("repair", help="make again what nodes lack of a run")
    repair.add_argument("run")
    repair.add_argument("agents", nargs="+", metavar="HOST:PORT", help="of all its nodes")
    repair.add_argument("--dry-run", action="store_true", help="only say what would be done")
    repair.add_argument("--memory-bytes", type=_bytes, default=0, help="the run's budget on a node")
    repair.add_argument("--token-file", type=Path, default=node.token_file)
    repair.add_argument("--json", action="store_true")
    repair.set_defaults(act=_repair)
    plan = commands.add_parser("plan-restore", help="what a restore would find, and take")
    plan.add_argument("run")
    plan.add_argument("agents", nargs="+", metavar="HOST:PORT", help="agents to ask")
    plan.add_argument("--without", nargs="*", default=[], metavar="NODE", help="as if these died")
    plan.add_argument(
        "--without-memory", action="store_true", help="as after a loss of power: disks only"
    )
    plan.add_argument("--token-file", type=Path, default=node.token_file)
    plan.add_argument("--json", action="store_true")
    plan.set_defaults(act=_plan_restore)


def _add_trace(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    node = NodeConfig.from_environment()
    trace = commands.add_parser(
        "trace", help="where the last saves and restores spent their time, for Perfetto"
    )
    trace.add_argument("run")
    trace.add_argument("agents", nargs="+", metavar="HOST:PORT", help="agents to ask")
    trace.add_argument("--out", type=Path, help="file to write (default: standard output)")
    trace.add_argument("--token-file", type=Path, default=node.token_file)
    trace.set_defaults(act=_trace)


def _add_exchange(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    node = NodeConfig.from_environment()
    export = commands.add_parser("export", help="write a checkpoint's tensors as files for others")
    export.add_argument("run")
    export.add_argument("agents", nargs="+", metavar="HOST:PORT", help="all that may hold some")
    export.add_argument(
        "--to",
        nargs=2,
        required=True,
        metavar=("FORMAT", "DIR"),
        help="safetensors: for Hugging Face's tools; dcp: for torch.distributed.checkpoint; "
        "DIR must be new or empty",
    )
    export.add_argument("--step", type=int, help="this step instead of the newest")
    export.add_argument("--prefix", help="of the names, cut off (safetensors: model., dcp: none)")
    export.add_argument("--rank", type=int, help="whose tensors, where ranks have different ones")
    export.add_argument(
        "--max-shard-bytes", type=_bytes, default="5GB", metavar="SIZE", help="of a file (5GB)"
    )
    export.add_argument("--token-file", type=Path, default=node.token_file)
    export.add_argument("--json", action="store_true")
    export.set_defaults(act=_export)
    take = commands.add_parser("import", help="save a folder of weights or of DCP as a new run")
    take.add_argument("run")
    take.add_argument("folder", type=Path, metavar="DIR")
    take.add_argument("--root", type=Path, default=node.root, help="of this node's agent")
    take.add_argument("--agents", nargs="*", default=[], metavar="HOST:PORT", help="more holders")
    take.add_argument("--step", type=int, default=0)
    take.add_argument(
        "--tie",
        type=_tie,
        nargs="*",
        default=[],
        metavar="NAME=STORED",
        help="further names of tensors that are there (lm_head.weight=model.embed_tokens.weight)",
    )
    take.add_argument("--json", action="store_true")
    take.set_defaults(act=_import)


def _tie(text: str) -> tuple[str, str]:
    name, equals, stored = text.partition("=")
    if not (name and equals and stored):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=STORED")
    return name, stored


def _bytes(text: str) -> int:
    match = re.fullmatch(r"([0-9]{1,15}) ?([KMGT]i?)?B?", text)
    if not match or not int(match[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is no size (such as 5GB or 512MiB)")
    power = " KMGT".index((match[2] or " ")[0])
    size: int = int(match[1]) * (1024 if (match[2] or "").endswith("i") else 1000) ** power
    return size


def _add_demo(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    demo = commands.add_parser("demo", help="train over several nodes, lose some, continue exactly")
    demo.add_argument("--nodes", type=int, default=6, help="nodes, with one rank each")
    demo.add_argument("--code", default="3+2", metavar="K+M")
    demo.add_argument("--lose", type=int, default=3, help="nodes to lose at once")
    demo.add_argument("--steps", type=int, default=12, help="training steps")
    demo.add_argument("--json", action="store_true", help="the last line is one JSON object")
    demo.set_defaults(act=_demo)


def _add_simulate(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    simulate = commands.add_parser(
        "simulate", help="run the real rules in simulated clusters, with faults drawn from seeds"
    )
    simulate.add_argument("--seed", type=int, default=0, help="the first one")
    simulate.add_argument("--seeds", type=_count, default=1, metavar="N", help="how many (1)")
    simulate.add_argument("--nodes", type=_nodes, default=64, metavar="N", help="3 to 2048 (64)")
    simulate.add_argument("--json", action="store_true")
    simulate.set_defaults(act=_simulate)


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seeds")
    return int(text)


def _nodes(text: str) -> int:
    if not text.isdecimal() or not 3 <= int(text) <= 2048:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of nodes from 3 to 2048")
    return int(text)


def _agent(arguments: argparse.Namespace) -> int:
    if arguments.stop:
        from ecckpt.agents import local_client

        local_client(arguments.root).shutdown()
        return 0
    from ecckpt.agent.daemon import AlreadyRunning, run_agent
    from ecckpt.agent.manners import Manners

    prefer(arguments.engine)
    try:
        run_agent(
            arguments.root,
            node=arguments.node,
            domain=arguments.domain or arguments.node,
            listen=arguments.listen,
            token=read_token(arguments.token_file),
            disk=arguments.disk,
            scrub_bytes_per_s=arguments.scrub_mb_s * 1e6,
            manners=Manners(arguments.cpus, arguments.nice, arguments.pull_mb_s * 1e6),
        )
    except AlreadyRunning as error:
        # Several ranks of a node start it at once; whoever is first serves them all.
        print(f"ecckpt: {error}", file=sys.stderr)
        return 1
    return 0


def _status(arguments: argparse.Namespace) -> int:
    from ecckpt.agents import local_client

    status = local_client(arguments.root).status()
    if arguments.json:
        print(json.dumps(status))
        return 0
    print(f"node {status['node']} (domain {status['domain']}) at {status['address']}")
    for run, facts in status["runs"].items():
        print(
            f"  run {run}: committed {facts['committed'] or 'nothing'}, "
            f"{facts['home_copies']} home copies, {facts['fragments']} fragments, "
            f"{facts['used_bytes']:,} bytes"
        )
        _print_guard(facts["guard"])
        _print_disk(facts)
        for name, why in facts["rejected"].items():
            print(f"    not adopted: {name}: {why}")
    if status["disk"]["problem"]:
        print(f"  disk: {status['disk']['problem']}")
    return 0


def _print_guard(guard: dict[str, Any] | None) -> None:
    if guard is None:
        return
    margin = "how many is not known yet" if guard["margin"] is None else f"any {guard['margin']}"
    print(f"    shards of this node's ranks survive more node losses: {margin}")
    if guard["missing"]:
        lost = f", lost: {', '.join(guard['lost'])}" if guard["lost"] else ""
        doing = f", repairing {guard['repairing']}" if guard["repairing"] else ""
        print(f"    fragments missing: {guard['missing']}{lost}{doing}")
    if guard["problem"]:
        print(f"    last repair: {guard['problem']}")


def _print_disk(facts: dict[str, Any]) -> None:
    if facts["disk_files"] or facts["stored"]:
        newest = facts["stored"][-1] if facts["stored"] else "nothing"
        print(
            f"    on disk: stored everywhere {newest}, here {facts['disk_files']} files, "
            f"{facts['disk_bytes']:,} bytes, {facts['disk_waiting_bytes']:,} to be written"
        )
    for problem in facts["disk_problems"]:
        print(f"    not on disk: {problem}")


def _verify(arguments: argparse.Namespace) -> int:
    from ecckpt.agents import local_client
    from ecckpt.checking import verify_run
    from ecckpt.client import AgentClient

    token = read_token(arguments.token_file)
    agents = [AgentClient(address, token) for address in arguments.agents]
    checked = verify_run(
        arguments.run,
        agents or [local_client(arguments.root)],
        bytes_per_s=int(arguments.max_mb_s * 1e6),
    )
    if arguments.json:
        print(json.dumps([asdict(each) for each in checked]))
    else:
        for each in checked:
            print(
                f"{each.node}: {each.silent or f'{each.files} files, {each.total_bytes:,} bytes'}"
            )
            for line in each.bad:
                print(f"  {line}")
    if not any(each.files for each in checked):
        print(f"ecckpt: nothing of run {arguments.run!r} was found", file=sys.stderr)
        return 2
    return 1 if any(each.bad or each.silent for each in checked) else 0


def _repair(arguments: argparse.Namespace) -> int:
    from ecckpt.client import AgentClient
    from ecckpt.repairing import repair_run

    token = read_token(arguments.token_file)
    agents = [AgentClient(address, token) for address in arguments.agents]
    done = repair_run(
        arguments.run, agents, memory_bytes=arguments.memory_bytes, dry_run=arguments.dry_run
    )
    if arguments.json:
        print(json.dumps(asdict(done) | {"generation": str(done.generation)}))
    else:
        print(
            f"{done.generation}: {done.fragments} fragments to make again, {done.homes} shards "
            f"decoded; survived {done.margin_before} more node losses, now {done.margin}"
        )
        for step in done.steps if arguments.dry_run else ():
            print(f"  {step}")
        for problem in done.problems:
            print(f"  {problem}")
    return 0 if done.complete and not done.problems else 1


def _plan_restore(arguments: argparse.Namespace) -> int:
    from ecckpt.client import AgentClient
    from ecckpt.recovery import plan_recovery

    token = read_token(arguments.token_file)
    inventories = []
    for address in arguments.agents:
        try:
            inventories.append(AgentClient(address, token).inventory(arguments.run))
        except AgentUnreachable as error:  # what people look at a plan for
            if len(arguments.agents) == 1:
                raise
            print(f"no answer: {error}", file=sys.stderr)
    left = [each for each in inventories if each.node not in arguments.without]
    if arguments.without_memory:
        left = [replace(each, headers=()) for each in left]
    plan = plan_recovery(arguments.run, left)
    chosen = plan.chosen
    if arguments.json:
        rows = [
            {
                "generation": str(report.generation),
                "state": report.state,
                "margin": report.margin,
                "abandoned": report.abandoned is not None,
            }
            for report in plan.generations
        ]
        print(
            json.dumps({"chosen": str(chosen.generation) if chosen else None, "generations": rows})
        )
    else:
        for report in plan.generations:
            mark = "*" if report is chosen else " "
            detail = report.why() or f"survives {report.margin} more node losses"
            print(f"{mark} {report.generation}  {report.state:11}  {detail}")
        if not plan.generations:
            print(f"nothing of run {arguments.run!r} on {len(left)} nodes")
    return 0 if chosen and chosen.state == "complete" else 1 if chosen else 2


def _trace(arguments: argparse.Namespace) -> int:
    from ecckpt.client import AgentClient
    from ecckpt.tracing import chrome_trace

    token = read_token(arguments.token_file)
    traces = []
    for address in arguments.agents:
        try:
            traces.append(AgentClient(address, token).trace(arguments.run))
        except AgentUnreachable as error:
            print(f"no answer: {error}", file=sys.stderr)
    if not traces:
        return 2
    text = json.dumps(chrome_trace(traces))
    if arguments.out is None:
        print(text)
    else:
        arguments.out.write_text(text)
        spans = sum(len(trace.ranks) + len(trace.agent) for trace in traces)
        print(f"{spans} spans of {len(traces)} nodes: {arguments.out}")
    return 0 if len(traces) == len(arguments.agents) else 1


def _export(arguments: argparse.Namespace) -> int:
    kind, folder = arguments.to
    if kind not in ("safetensors", "dcp"):
        raise InvalidConfig(f"--to {kind}: no such format", hint="safetensors or dcp")
    from ecckpt.opening import open as open_run

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
        from ecckpt.integrations.dcp_directory import export_dcp

        return export_dcp(opened, folder, prefix=arguments.prefix or "")
    from ecckpt.exporting import export_safetensors

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
        from ecckpt.importing import import_safetensors

        return import_safetensors(run, folder, root=root, agents=agents, step=step, ties=ties)
    if ties:
        raise InvalidConfig("--tie: DCP's folders have every name")
    from ecckpt.integrations.dcp_import import import_dcp

    return import_dcp(run, folder, root=root, agents=agents, step=step)


def _demo(arguments: argparse.Namespace) -> int:
    from ecckpt.demo.show import run_demo

    return run_demo(
        nodes=arguments.nodes,
        code=arguments.code,
        lose=arguments.lose,
        steps=arguments.steps,
        as_json=arguments.json,
    )


def _simulate(arguments: argparse.Namespace) -> int:
    from ecckpt.sim.campaign import Tally, campaign, describe
    from ecckpt.sim.simulate import Outcome

    first, count = arguments.seed, arguments.seeds

    def ended(outcome: Outcome, tally: Tally) -> None:
        if arguments.json:
            return
        if count == 1 or outcome.violation:
            print(describe(outcome), flush=True)
        elif tally.seeds % 100 == 0:
            print(tally, flush=True)

    tally = campaign(range(first, first + count), arguments.nodes, ended=ended)
    if arguments.json:
        print(json.dumps(tally.as_json(), indent=2))
    else:
        print(tally)
    return 1 if tally.failed else 0
