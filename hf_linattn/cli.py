# Copyright 2026 The hf-linattn authors. Licensed under the Apache License, Version 2.0.
"""The command `hf-linattn`. Results go to standard output, progress and errors to standard error.

Exit codes: 0 done, 1 failed, 2 bad input, 130 interrupted.
"""

import argparse
import ctypes
import json
import signal
import sys
import traceback

STAGES = "write,calibrate,align,distil,report"


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line and returns the exit code."""
    options = vars(_parser().parse_args(arguments))
    command, as_json, debug = options.pop("command"), options.pop("json"), options.pop("debug")
    signal.signal(signal.SIGTERM, _interrupt)
    _keep_freed_memory()
    try:
        result, text = COMMANDS[command]({name: value for name, value in options.items() if value is not None})
        print(json.dumps(result, indent=2) if as_json else text)
        return 0
    except KeyboardInterrupt as error:
        return _fail(str(error) or "interrupted.", 130, debug)
    except (ValueError, NotImplementedError) as error:
        return _fail(error, 2, debug)
    except Exception as error:  # the user gets one line, --debug shows the rest
        return _fail(f"{type(error).__name__}: {error}" if type(error).__module__ == "builtins" else error, 1, debug)


def _keep_freed_memory() -> None:
    """Tell glibc to reuse large blocks: handing each back to the system made training on the CPU three times slower."""
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        for setting, value in ((-3, 1 << 25), (-1, 1 << 30), (-2, 1 << 28)) if mallopt else ():  # mmap, trim, top pad
            mallopt(setting, value)


def _interrupt(number, frame) -> None:
    raise KeyboardInterrupt


def _fail(error: object, code: int, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
    return code


def _plan(options: dict) -> tuple[dict, str]:
    from hf_linattn.conversion import plan
    from hf_linattn.conversion.plan import format_plan

    result = plan(**_with_recipe(options))
    return result, format_plan(result)


def _convert(options: dict) -> tuple[dict, str]:
    from hf_linattn.conversion import convert

    options = _with_recipe(options)
    if "output" not in options:
        raise ValueError("no output: say where the result goes with --output DIR.")
    return _summed_up(convert(**options))


def _train(options: dict) -> tuple[dict, str]:
    from hf_linattn.conversion import train

    return _summed_up(train(**_with_recipe(options)))


def _summed_up(report: dict) -> tuple[dict, str]:
    lines = [f"written to {report['output']}"]
    if "converted" in report:
        from hf_linattn.conversion.report import format_table

        lines.insert(0, format_table(report))
    return report, "\n".join(lines)


def _evaluate(options: dict) -> tuple[dict, str]:
    from hf_linattn.conversion import evaluate
    from hf_linattn.conversion.report import format_table

    report = evaluate(**options)
    return report, format_table(report)


def _revert(options: dict) -> tuple[dict, str]:
    from hf_linattn.conversion import revert

    result = revert(**options)
    return result, f"{result['files']} files of {result['base']} written to {result['output']}, every hash as it was"


def _push(options: dict) -> tuple[dict, str]:
    from hf_linattn.conversion import push

    result = push(**options)
    return result, f"pushed to {result['url']}"


def _demo(options: dict) -> tuple[dict, str]:
    from hf_linattn.conversion import demo

    report, text = _summed_up(demo(**options))
    texts = report["continuation"]
    shown = [f"--- {name} continues:\n{texts['prompt']}{texts[name]}" for name in ("teacher", "converted")]
    return report, "\n".join([text, *shown])


COMMANDS = {
    "plan": _plan,
    "convert": _convert,
    "train": _train,
    "evaluate": _evaluate,
    "revert": _revert,
    "push": _push,
    "demo": _demo,
}


def _with_recipe(options: dict) -> dict:
    """The values of --recipe, with those of the command line over them."""
    from hf_linattn.conversion.recipe import read_recipe

    path = options.pop("recipe", None)
    values = (read_recipe(path) if path else {}) | options
    if "source" not in values and "directory" not in values:
        raise ValueError("no source: name a checkpoint on the command line or in the recipe.")
    return values


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers such as 256,512") from None


def _layers(text: str) -> str | list[int]:
    return text if text in ("default", "all", "global") else _numbers(text)


def _parser() -> argparse.ArgumentParser:
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--json", action="store_true", help="print the result as JSON, and nothing else")
    shared.add_argument("--debug", action="store_true", help="show the traceback of an error")

    text = argparse.ArgumentParser(add_help=False)
    text.add_argument("--data", help="text file, JSON lines with `text`, folder of both (plain or .gz), or dataset")

    where = argparse.ArgumentParser(add_help=False)
    where.add_argument("--seed", type=int, help="of everything random (0)")
    where.add_argument("--device", help="cpu, cuda, cuda:1, ... (a GPU if there is one)")

    training = argparse.ArgumentParser(add_help=False)
    training.add_argument("--recipe", metavar="FILE.yaml", help="settings; the command line goes before them")
    training.add_argument("--tokens", type=int, help="tokens to train on, align and distil together")
    training.add_argument("--stages", type=lambda text: text.split(","), help=f"some of {STAGES} (all)")
    training.add_argument("--eval-data", dest="eval_data", help="text for the report (the beginning of --data)")
    training.add_argument("--lengths", type=_numbers, help="lengths of the report, such as 256,512,1024")

    output = argparse.ArgumentParser(add_help=False)
    output.add_argument("--overwrite", action="store_true", default=None, help="replace the output when all is done")
    output.add_argument("--resume", action="store_true", default=None, help="continue an interrupted run")

    mixer = argparse.ArgumentParser(add_help=False)
    mixer.add_argument("--to", help="what layers are converted to (latte)")
    mixer.add_argument("--gate", help="lse or learned")
    mixer.add_argument("--init", help="of the latents: data or random")
    mixer.add_argument("--window", type=int, help="tokens of exact attention")
    mixer.add_argument("--sinks", type=int, help="first tokens that stay exact")
    mixer.add_argument("--latents", type=int, help="latents per key-value head")
    mixer.add_argument("--layers", type=_layers, help="default, all, global or numbers such as 0,2,5")

    parser = argparse.ArgumentParser("hf-linattn", description="Turns softmax checkpoints into linear-time ones.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, about: str, *parents: argparse.ArgumentParser) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=about, description=about, parents=[shared, *parents])

    command = add("plan", "Say what a conversion would do.", text, where, training, mixer)
    command.add_argument("source", nargs="?", help="checkpoint folder or Hub id")
    command.add_argument("--output", help=argparse.SUPPRESS)  # so that a convert command can be planned as it is

    command = add("convert", f"Convert a checkpoint: {STAGES}.", text, where, training, mixer, output)
    command.add_argument("source", nargs="?", help="checkpoint folder or Hub id")
    command.add_argument("--output", metavar="DIR", help="the folder to make")

    command = add("train", "Train the new weights of a converted checkpoint further.", text, where, training, output)
    command.add_argument("directory", help="converted checkpoint")
    command.add_argument("--output", metavar="DIR", required=True, help="the folder to make")

    command = add("evaluate", "Compare a converted checkpoint with its teacher.", where)
    command.add_argument("directory", help="converted checkpoint")
    command.add_argument("--teacher", metavar="SRC", help="the teacher (the base inside the checkpoint)")
    command.add_argument("--data", required=True, help="text, as for convert")
    command.add_argument("--lengths", type=_numbers, help="such as 256,512,1024 (1/2 to 8 times the trained length)")
    command.add_argument("--distances", type=_numbers, help="of planted repeats")
    command.add_argument("--tokens", type=int, help="tokens of text to use (32768)")
    command.add_argument("--report", metavar="DIR", help="folder for report.json, plots and the model card")

    command = add("revert", "Get the original checkpoint back, bit for bit.")
    command.add_argument("directory", help="converted checkpoint")
    command.add_argument("--output", metavar="DIR", required=True, help="the folder to make")
    command.add_argument("--overwrite", action="store_true", default=None, help="replace the output")

    command = add("push", "Upload a converted checkpoint to the Hub.")
    command.add_argument("directory", help="converted checkpoint")
    command.add_argument("repo_id", metavar="REPO_ID", help="user/name")
    command.add_argument("--private", action="store_true", default=None, help="make the repository private")

    command = add("demo", "Convert the small teacher inside the package and show what it keeps.", where)
    command.add_argument("--output", metavar="DIR", help="the folder to make (demo-output)")
    command.add_argument("--overwrite", action="store_true", default=None, help="replace the output when all is done")
    return parser


if __name__ == "__main__":
    sys.exit(main())
