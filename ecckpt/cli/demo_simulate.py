"""``ecckpt demo`` and ``ecckpt simulate``: runs that show and test how losses are survived."""

from __future__ import annotations

import argparse
import json
import time

from ecckpt.cli.argument_types import nodes_of, seeds_of


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommands to the parser."""
    demo = commands.add_parser("demo", help="train over several nodes, lose some, continue exactly")
    demo.add_argument("--nodes", type=int, default=6, help="number of nodes, with one rank each")
    demo.add_argument("--code", default="3+2", metavar="K+M")
    demo.add_argument("--lose", type=int, default=3, help="number of nodes to lose at once")
    demo.add_argument("--steps", type=int, default=12, help="number of training steps")
    demo.add_argument("--json", action="store_true", help="print a JSON object as the last line")
    demo.set_defaults(act=_demo)
    simulate = commands.add_parser(
        "simulate", help="run the agents' decisions in simulated clusters, with seeded faults"
    )
    simulate.add_argument("--seed", type=int, default=0, help="the first seed (default: 0)")
    simulate.add_argument(
        "--seeds", type=seeds_of, default=1, metavar="N", help="number of seeds (default: 1)"
    )
    simulate.add_argument(
        "--nodes",
        type=nodes_of,
        default=64,
        metavar="N",
        help="number of nodes, 3 to 2048 (default: 64)",
    )
    simulate.add_argument("--json", action="store_true")
    simulate.set_defaults(act=_simulate)


def _demo(arguments: argparse.Namespace) -> int:
    from ecckpt.cli.demo.show import run_demo

    return run_demo(
        nodes=arguments.nodes,
        code=arguments.code,
        lose=arguments.lose,
        steps=arguments.steps,
        as_json=arguments.json,
    )


def _simulate(arguments: argparse.Namespace) -> int:
    from ecckpt.sim.campaign import Tally, campaign, describe
    from ecckpt.sim.simulate import SimulationOutcome

    first, count = arguments.seed, arguments.seeds

    def ended(outcome: SimulationOutcome, tally: Tally) -> None:
        if arguments.json:
            return
        if count == 1 or outcome.violation:
            print(describe(outcome), flush=True)
        elif tally.seeds % 100 == 0:
            print(tally, flush=True)

    tally = campaign(
        range(first, first + count), arguments.nodes, clock=time.monotonic, ended=ended
    )
    if arguments.json:
        print(json.dumps(tally.as_json(), indent=2))
    else:
        print(tally)
    return 1 if tally.failed else 0
