"""Kernels of notebooks that begin with their packages imported.

Some thirty pages run code, each in its own kernel. A kernel takes eight seconds to import torch,
transformers and captum_ssm. Here one process imports them, and every kernel is a fork of it.
Jupyter starts a small program in the kernel's place. It asks that process for the fork and ends
with it.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sphinx.application import Sphinx
    from sphinx.util.typing import ExtensionMetadata

#: All that is imported before.  IPython comes last: some packages print otherwise where it is.
PACKAGES = (
    *("matplotlib.pyplot", "captum.attr", "captum_ssm.inside", "captum_ssm.viz"),
    *("captum_ssm_bench", "transformers.models.mamba.modeling_mamba"),
    *("transformers.models.mamba2.modeling_mamba2", "transformers.models.vit.modeling_vit"),
    *("captum_ssm.mixers.mamba", "captum_ssm.mixers.vim", "matplotlib.backends.backend_agg"),
    *("PIL.JpegImagePlugin", "ipykernel.kernelapp", "ipykernel.ipkernel", "ipykernel.zmqshell"),
    *("IPython.core.magics", "IPython.core.completerlib", "IPython.extensions.storemagic"),
    "matplotlib_inline.backend_inline",
)


def serve(listener: socket.socket) -> None:
    """Fork a kernel for each request, until the process that builds the pages has ended."""
    os.environ.setdefault("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    sys.modules["debugpy"] = None  # type: ignore[assignment]  # each kernel would import it
    for name in PACKAGES:
        import_module(name)
    children: list[int] = []
    while sys.stdin not in select.select([listener, sys.stdin], [], [])[0]:
        request, _ = listener.accept()
        with request:
            children = [child for child in children if os.waitpid(child, os.WNOHANG)[0] == 0]
            asked = json.loads(request.makefile().readline())
            if child := os.fork():
                children.append(child)
                continue
            os.environ |= asked["environment"]
            os.chdir(asked["folder"])
            for stream in (1, 2):  # what cells print goes by Jupyter's messages
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
            from ipykernel.kernelapp import IPKernelApp

            # matplotlib is there before the shell, which else would show figures as texts
            options = ["--matplotlib=inline", *asked["options"]]
            IPKernelApp.launch_instance(argv=["-f", asked["connection"], *options])
            os._exit(0)
    for child in children:
        os.kill(child, signal.SIGTERM)


def ask(place: str, connection: str, *options: str) -> None:
    """Ask for a kernel and wait for its end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Jupyter interrupts a kernel that it ends
    asked = {"connection": connection, "options": options}
    asked |= {"folder": os.getcwd(), "environment": dict(os.environ)}
    with socket.socket(socket.AF_UNIX) as request:
        request.connect(place)
        request.sendall(f"{json.dumps(asked)}\n".encode())
        request.recv(1)  # nothing comes until the fork's copy of the connection is closed


def setup(app: Sphinx) -> ExtensionMetadata:
    """Start the process, and let Jupyter find it under the name of its usual kernel."""
    folder = tempfile.TemporaryDirectory()
    place, listener = f"{folder.name}/socket", socket.socket(socket.AF_UNIX)
    listener.bind(place)
    listener.listen()
    command = [sys.executable, __file__, str(listener.fileno())]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[listener.fileno()])

    def stop(app: Sphinx, error: Exception | None) -> None:
        server.communicate()  # which closes its input
        folder.cleanup()

    app.connect("build-finished", stop)
    specification = Path(folder.name, "kernels", "python3", "kernel.json")
    specification.parent.mkdir(parents=True)
    argv = [sys.executable, "-S", __file__, place, "{connection_file}"]
    specification.write_text(json.dumps({"argv": argv, "display_name": "", "language": "python"}))
    os.environ["JUPYTER_PATH"] = folder.name
    return {"parallel_read_safe": True, "parallel_write_safe": True}


if __name__ == "__main__":
    if len(sys.argv) == 2:
        serve(socket.socket(fileno=int(sys.argv[1])))
    else:
        ask(*sys.argv[1:])
