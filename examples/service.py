"""A web service around an exported model: probabilities, score, p-value, and a monitor.

    python examples/service.py model.onnx --port 8000

``POST /predict`` takes ``{"x": [[...], ...]}`` and answers for each row. ``GET /metrics`` is what
Prometheus reads, ``GET /health`` says that the service is up. It needs numpy and onnxruntime, and
neither torch nor rgpr, but for the monitor:

    python examples/service.py model.onnx --model nets:digits --fitted m.safetensors \\
        --state w.safetensors

This is an example to start from. It speaks plain HTTP to a single machine: put it behind a server
that does TLS, authentication and limits.
"""

from __future__ import annotations

import argparse
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import onnxruntime

# More rows than this in one request are refused: memory is for everybody.
MOST_ROWS = 4096


class Service:
    """Answers requests with a model; requests may come from several threads.

    Args:
        graph: The file that ``rgpr export --form onnx`` wrote, of a calibrated model.
        alpha: Inputs with a p-value of at most this are flagged.
        monitor: An ``rgpr.Monitor``, or ``None``.
        state: Where the monitor is saved after every request.
    """

    def __init__(self, graph: str, alpha: float, monitor: Any = None, state: str = "") -> None:
        self.session = onnxruntime.InferenceSession(graph, providers=["CPUExecutionProvider"])
        self.entry = self.session.get_inputs()[0]
        self.names = [output.name for output in self.session.get_outputs()]
        self.alpha, self.monitor, self.state = alpha, monitor, state
        self.lock = threading.Lock()
        self.requests = 0

    def predict(self, body: bytes) -> dict[str, Any]:
        """The answers as JSON; raises ValueError for what cannot be answered."""
        try:
            x = np.asarray(json.loads(body)["x"], dtype=np.float32)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f'expected {{"x": [[...], ...]}} with numbers: {error}') from None
        shape = [size for size in self.entry.shape[1:] if isinstance(size, int)]
        if x.ndim != 1 + len(shape) or list(x.shape[1:]) != shape:
            raise ValueError(
                f"x has shape {x.shape}; expected (rows, {', '.join(map(str, shape))})"
            )
        if not 0 < len(x) <= MOST_ROWS:
            raise ValueError(f"{len(x)} rows; expected 1 to {MOST_ROWS}")
        found = dict(zip(self.names, self.session.run(None, {self.entry.name: x}), strict=True))
        answer = {name: array.tolist() for name, array in found.items()}
        if "p_value" in found:
            # A row with a NaN has no p-value, and is flagged.
            answer["flag"] = (~(found["p_value"] > self.alpha)).tolist()
        with self.lock:  # the order of inputs is the order in which requests come through here
            self.requests += 1
            if self.monitor is not None:
                status = self.monitor.update_scores(found["score"])
                self.monitor.save(self.state)
                answer["alarm"] = status.alarm
        return answer

    def metrics(self) -> str:
        with self.lock:
            own = "# TYPE rgpr_requests_total counter\n"
            own += f"rgpr_requests_total {self.requests}\n"
            return own + ("" if self.monitor is None else self.monitor.prometheus())


def handler(service: Service) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            if self.path != "/predict":
                return self._send(404, b"no such path\n", "text/plain")
            length = int(self.headers.get("Content-Length", 0))
            try:
                answer = service.predict(self.rfile.read(length))
            except ValueError as error:
                return self._json(400, {"error": str(error)})
            return self._json(200, answer)

        def do_GET(self) -> None:
            if self.path == "/metrics":
                return self._send(200, service.metrics().encode(), "text/plain; version=0.0.4")
            if self.path == "/health":
                return self._json(200, {"status": "up"})
            return self._send(404, b"no such path\n", "text/plain")

        def _json(self, code: int, value: dict[str, Any]) -> None:
            self._send(code, json.dumps(value).encode(), "application/json")

        def _send(self, code: int, body: bytes, kind: str) -> None:
            self.send_response(code)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Prometheus asks every few seconds; nothing is printed for that."""

    return Handler


def watched(spec: str, fitted: str, state: str) -> Any:
    """The monitor of a calibrated model, taken up where an earlier process left it."""
    from importlib import import_module
    from pathlib import Path

    import rgpr

    module, _, factory = spec.partition(":")
    model = rgpr.load(fitted, getattr(import_module(module), factory)())
    if Path(state).exists():
        return rgpr.Monitor.load(state, model)
    return rgpr.Monitor(model, layers=False)  # the graph gives the score, and no layers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("graph", help="the model as .onnx, exported after calibrate")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one")
    parser.add_argument("--alpha", type=float, default=0.05)
    parser.add_argument("--model", help="package.module:factory of the network, for the monitor")
    parser.add_argument("--fitted", help="the model as .safetensors, for the monitor")
    parser.add_argument("--state", help="what the monitor remembers")
    options = parser.parse_args()
    given = [options.model, options.fitted, options.state]
    if any(given) and not all(given):
        parser.error("the monitor needs all of --model, --fitted and --state")
    monitor = watched(*given) if all(given) else None
    service = Service(options.graph, options.alpha, monitor, options.state or "")
    server = ThreadingHTTPServer((options.host, options.port), handler(service))
    print(f"listening on http://{options.host}:{server.server_address[1]}", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        print("stopped", flush=True)


if __name__ == "__main__":
    main()
