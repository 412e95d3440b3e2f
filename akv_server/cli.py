"""The command line: `akv serve`, `akv demo`, `akv bench`, `akv estimate`, `akv --version`.

Owns options, what start-up prints, and exit statuses. Everything heavy is imported only once a command needs it.
"""

from __future__ import annotations

import argparse
import ipaddress
import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack, closing
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from akv_server.errors import AkvError

if TYPE_CHECKING:
    from akv_server.model import Weights


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit status: 0 done, 1 failed, 2 asked for what cannot be."""
    given = list(sys.argv[1:] if argv is None else argv)
    if given[:1] == ["demo"]:
        from akv_demo.main import main as demo

        return demo(given[1:])
    if given[:1] == ["bench"]:
        from akv_bench.main import main as bench

        return bench(given[1:])
    if given[:1] == ["estimate"]:
        from akv_server.estimate import main as estimate

        return estimate(given[1:])
    options = _parser().parse_args(given)
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)  # a stop is a stop, whoever asks for it
    try:
        return _serve(options)
    except KeyboardInterrupt:
        print("stopped")
        return 0
    except AkvError as error:
        print(f"akv: {error.message}", file=sys.stderr)
        return 1
    finally:
        signal.signal(signal.SIGTERM, previous)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="akv", description="Inference server whose context is managed in the cache.")
    parser.add_argument("--version", action="version", version=f"akv {version('akv')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve = commands.add_parser("serve", help="serve a model over HTTP", description="Serve a model over HTTP.")
    add = serve.add_argument
    add("--model", default="default", help="default (SmolLM2-135M-Instruct), a .gguf file, a directory, or a hub id")
    add("--weights", choices=("float32", "int8", "bfloat16"), help="default: int8 on a CPU, bfloat16 on a GPU")
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    add("--port", type=_port, default=8000, help="0 for a free one (default: %(default)s)")
    add(
        "--api-key",
        type=_tenant_and_key,
        action="append",
        default=[],
        metavar="NAME:KEY",
        help="a tenant and its key; repeatable. Without one the server listens on loopback only",
    )
    add("--pool-tokens", type=_positive, metavar="N", help="size of the cache (default: the window, memory allowing)")
    add("--max-running", type=_positive, default=64, metavar="N", help="requests at a time (default: %(default)s)")
    tier = serve.add_mutually_exclusive_group()
    tier.add_argument("--kv-disk", type=Path, metavar="PATH", help="file for evicted KV, which outlives the server")
    tier.add_argument("--kv-host-gb", type=_gigabytes, metavar="N", help="keep evicted KV in host memory, up to N GB")
    add("--kv-disk-gb", type=_gigabytes, metavar="N", help="limit of the file of --kv-disk (default: 10)")
    add("--state", metavar="PATH", help="file that sessions are kept in, to outlive the server (default: in memory)")
    add(
        "--session-ttl",
        type=_positive,
        default=24 * 3600,
        metavar="SECONDS",
        help="a session that is idle for so long is forgotten (default: %(default)s, a day)",
    )
    add(
        "--max-sessions",
        type=_positive,
        default=1000,
        metavar="N",
        help="beyond so many, the least recently used idle ones are forgotten (default: %(default)s)",
    )
    add(
        "--auto-drop",
        action="append",
        nargs="?",
        default=[],
        metavar="TENANT",
        help="drop marked observations that get no attention, for this tenant (repeatable) or, without a name, for all",
    )
    commands.add_parser("demo", help="run the demo (akv demo --help)", add_help=False)
    commands.add_parser("bench", help="replay recorded agents (akv bench --help)", add_help=False)
    commands.add_parser("estimate", help="FLOPs, bytes and time on paper (akv estimate --help)", add_help=False)
    return parser


def _serve(options: argparse.Namespace) -> int:
    if not options.api_key and not _is_loopback(options.host):
        print(f"akv: {options.host} is not loopback; listening there needs --api-key NAME:KEY", file=sys.stderr)
        return 2
    tenants = sorted({tenant for tenant, _ in options.api_key})
    for name in options.auto_drop:
        if name not in (None, *tenants):
            known = ", ".join(tenants) or "none"
            print(f"akv: --auto-drop {name}: no tenant of --api-key has this name ({known})", file=sys.stderr)
            return 2
    if options.kv_disk_gb and not options.kv_disk:
        print("akv: --kv-disk-gb is the limit of a file: it needs --kv-disk PATH", file=sys.stderr)
        return 2
    disk_bytes = options.kv_disk_gb or 10 * 10**9
    from akv_server import serving

    try:  # before anything is loaded: a taken port should not cost a minute
        listener = serving.listen(options.host, options.port)
    except OSError as error:
        print(f"akv: cannot listen on {options.host} port {options.port}: {error.strerror or error}", file=sys.stderr)
        return 1
    with listener, ExitStack() as resources:
        import torch

        from akv_server import loader
        from akv_server.journal import Journal

        journal = resources.enter_context(closing(Journal(options.state))) if options.state else None
        device = "cuda" if torch.cuda.is_available() else "cpu"
        weights: Weights = options.weights or ("int8" if device == "cpu" else "bfloat16")
        print(f"loading  {options.model}", flush=True)
        loaded = loader.load(options.model, weights=weights, device=device)
        pool_tokens = options.pool_tokens or serving.default_pool_tokens(loaded, device)
        with serving.running(
            loaded,
            pool_tokens=pool_tokens,
            max_running=options.max_running,
            kv_disk=(options.kv_disk, disk_bytes) if options.kv_disk else None,
            kv_host_bytes=options.kv_host_gb or 0,
            journal=journal,
            session_ttl_s=options.session_ttl,
            max_sessions=options.max_sessions,
            auto_drop=lambda tenant: not {None, tenant}.isdisjoint(options.auto_drop),
        ) as service:
            where = f"{torch.get_num_threads()} CPU threads" if device == "cpu" else torch.cuda.get_device_name()
            print(f"model    {service.model}, weights {weights}, {where}")
            print(f"window   {service.window} positions")
            print(
                f"pool     {service.pool_tokens} tokens, {serving.pool_bytes(loaded, service.pool_tokens) / 1e6:.0f} MB"
            )
            if options.kv_disk:
                num_tokens = service.engine.stats()["tier_blocks"] * serving.PAGE_SIZE
                print(f"evicted  {options.kv_disk}, up to {disk_bytes / 1e9:g} GB, {num_tokens} tokens in it")
            elif options.kv_host_gb:
                print(f"evicted  host memory, up to {options.kv_host_gb / 1e9:g} GB")
            if options.state:
                print(f"state    {options.state}, {len(service.sessions)} sessions")
            print(f"tenants  {', '.join(tenants) or 'none: no key needed, loopback only'}")
            print(f"serving  {serving.url(listener)}/v1 (Ctrl-C ends it)", flush=True)
            serving.serve(listener, service, options.api_key)
    return 0


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _tenant_and_key(text: str) -> tuple[str, str]:
    tenant, colon, key = text.partition(":")
    if not (tenant and colon and key):
        raise argparse.ArgumentTypeError("must be NAME:KEY")
    return tenant, key


def _port(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) < 2**16):
        raise argparse.ArgumentTypeError(f"{text!r} is no port")
    return int(text)


def _gigabytes(text: str) -> int:
    """Bytes of so many GB."""
    try:
        number = float(text)
    except ValueError:
        number = 0
    if not 1e-9 <= number < 10**6:  # a byte
        raise argparse.ArgumentTypeError(f"{text!r} is no number of gigabytes")
    return int(number * 1e9)


def _positive(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 2**31):
        raise argparse.ArgumentTypeError(f"{text!r} is no positive number")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
