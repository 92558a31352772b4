"""The server: who it answers, how, and when it ends; and the page that is kept."""

from __future__ import annotations

import html
import re
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from helpers.insights_examples import Always, ask, numbers, table, table_model
from helpers.pages import addresses, digest, read_page

from captum_ssm.errors import OptionError
from captum_ssm.insights import FilterConfig

pytestmark = pytest.mark.slow


@pytest.fixture
def visualizer():
    with table(Always(1), [numbers(1, 0, 2)]) as made:
        made.serve()
        yield made


def test_the_address_that_is_printed_opens_the_page(capsys, monkeypatch):
    display = pytest.importorskip("IPython.display")
    frames = []
    monkeypatch.setattr(display, "display", frames.append)
    with table(Always(1), [numbers(1)]) as visualizer:
        port = visualizer.serve()
        assert visualizer.url in capsys.readouterr().out
        assert visualizer.url.startswith(f"http://127.0.0.1:{port}/?token=")
        answer = ask(visualizer.url)
        assert answer.status == 200 and b"<title>Insights</title>" in answer.body
        visualizer.render()  # in a notebook the page is a frame
        assert [frame.src for frame in frames] == [visualizer.url]


def test_the_page_names_only_what_is_served_and_puts_no_text_into_markup(visualizer):
    svg = "'http://www.w3.org/2000/svg'"  # the name of a language, which nobody fetches
    texts = [ask(visualizer.url).body.decode()]
    for name in re.findall(r'(?:src|href)="([^"#]+)"', texts[0]):
        if name.startswith("data:"):
            continue
        answer = ask(visualizer.url, f"/{name}", token="")
        assert answer.status == 200 and len(answer.body) > 100
        kind = {"css": "text/css", "js": "text/javascript"}[name.rpartition(".")[2]]
        assert answer.headers["Content-Type"] == f"{kind}; charset=utf-8"
        texts.append(answer.body.decode())
    assert len(texts) > 3
    for text in texts:
        forbidden = r"https?://|innerHTML|outerHTML|insertAdjacentHTML|eval\("
        assert not re.search(forbidden, text.replace(svg, ""))


def test_all_answers_forbid_what_the_page_does_not_need(visualizer):
    for path, token, kind in (
        ("/", None, "text/html; charset=utf-8"),
        ("/insights.js", "", "text/javascript; charset=utf-8"),
        ("/api/config", None, "application/json"),
        ("/", "wrong", "application/json"),
    ):
        headers = ask(visualizer.url, path, token=token).headers
        assert headers["Content-Type"] == kind
        policy = headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy
        assert "script-src 'self'" in policy and "form-action 'none'" in policy
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Referrer-Policy"] == "no-referrer"
        assert headers["Cache-Control"] == "no-store"
        assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
        assert "Access-Control-Allow-Origin" not in headers and "Python" not in headers["Server"]


def test_without_the_token_nothing_is_told(visualizer):
    with table(Always(1), [numbers(1)]) as other:  # which has a token of its own
        other.serve()
        own, foreign = (made.url.partition("token=")[2] for made in (visualizer, other))
    assert own != foreign and len(own) >= 32
    for path in ("/", "/api/config", "/api/examples", "/api/relevance", "/api/cut", "/api/flow"):
        request = None if path in ("/", "/api/config") else {}
        for token in ("", own[:9], foreign, "token=", "%c3%a9", "%00", "%ff"):
            answer = ask(visualizer.url, path, request, token=token)
            assert answer.status == 403 and "token" in answer.json["error"]
    much = b" " * 2**20
    assert ask(visualizer.url, "/api/examples", much, token="wrong").status == 403
    assert ask(visualizer.url, "/api/examples", much[2:] + b"{}").status == 200


HOSTS = ["example.com", "example.com:{port}", "127.0.0.1", "127.0.0.1:1", "localhost", ""]
HOSTS += ["[::1]:{port}"]


def test_only_its_own_names_are_answered(visualizer):
    """Neither under a foreign name, nor from a page of another site."""
    port = visualizer.serve()
    for host in HOSTS:
        for path in ("/", "/insights.js", "/api/config"):
            answer = ask(visualizer.url, path, headers={"Host": host.format(port=port)})
            assert answer.status == 403 and b"title" not in answer.body, host
    for named in (f"127.0.0.1:{port}", f"localhost:{port}"):
        headers = {"Host": named, "Origin": f"http://{named}"}
        assert ask(visualizer.url, "/api/examples", {}, headers=headers).status == 200
    for origin in ("http://example.com", "null", f"https://127.0.0.1:{port}"):
        answer = ask(visualizer.url, "/api/examples", {}, headers={"Origin": origin})
        assert answer.status == 403


BAD = [
    ("/api/examples", b"{", 400, "not JSON"),
    ("/api/examples", b"\xff", 400, "not JSON"),
    ("/api/examples", b"[" * 10**5, 400, "not JSON"),
    ("/api/examples", b"[]", 400, "not a JSON object"),
    ("/api/examples", {"filter": {"prediction": "right"}}, 400, "prediction='right'"),
    ("/api/examples", None, 404, "no such page"),
    ("/api/config", {}, 404, "no such page"),
    ("/api/other", None, 404, "no such page"),
    ("/../visualizer.py", None, 404, "no such page"),
    ("/page.html", None, 404, "no such page"),
    ("/", {}, 404, "no such page"),
]


def test_what_cannot_be_answered_says_so(visualizer):
    for path, request_, status, what in BAD:
        answer = ask(visualizer.url, path, request_)
        assert answer.status == status and what in answer.json["error"]
        assert ask(visualizer.url, "/api/config").status == 200
    for length in ("x", "-1", "", str(2**21), "9" * 5000):
        headers = {"Content-Length": length}
        assert ask(visualizer.url, "/api/examples", headers=headers, method="POST").status == 411
    for method in ("PUT", "DELETE", "OPTIONS", "HEAD"):
        assert ask(visualizer.url, "/api/config", method=method).status == 501


def test_an_error_is_told_and_with_debug_printed(visualizer, capsys):
    with socket.create_connection(("127.0.0.1", visualizer.serve())) as connection:
        connection.sendall(b"GET /api/config HTTP/1.1\r\n")  # and goes away, which is none
    capsys.readouterr()
    assert ask(visualizer.url, "/api/config").status == 200
    assert capsys.readouterr().err == ""

    def dataset():
        raise OSError("no disk")
        yield

    for debug in (False, True):
        with table(Always(1), dataset()) as broken:
            broken.serve(debug=debug)
            capsys.readouterr()
            answer = ask(broken.url, "/api/config")
            assert (answer.status, answer.json) == (500, {"error": "OSError: no disk"})
            printed = capsys.readouterr().err
            assert ("Traceback" in printed and "GET /api/config 500" in printed) == debug
            assert broken.url.partition("token=")[2] not in printed


def test_questions_at_the_same_time_are_all_answered():
    model = table_model()
    with table([model, model], [numbers(*range(5))]) as visualizer:
        visualizer.serve()

        def often(name: str):
            request = {"filter": {"attribution_method": name}, "again": True}
            return ask(visualizer.url, "/api/examples", request).json

        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(often, ["Deep Lift", "Integrated Gradients"] * 4))
    for answer in answers:
        outputs = [output for example in answer["examples"] for output in example["models"]]
        assert len(outputs) == 8 and not any("error" in output for output in outputs)


def test_it_is_served_again(visualizer, capsys):
    url, port = visualizer.url, visualizer.serve()
    assert visualizer.serve(port=port) == port and visualizer.url == url
    assert capsys.readouterr().out.count(url) >= 2
    with pytest.raises(OptionError, match=f"already served on port {port}"):
        visualizer.serve(port=port % 60000 + 1024)
    visualizer.close()
    with pytest.raises(ConnectionRefusedError):
        ask(url, "/")
    visualizer.close()
    assert visualizer.serve(port=port) == port
    assert ask(visualizer.url, "/").status == 200
    assert ask(url, "/").status == 403


def test_a_port_that_cannot_be_had_is_named(visualizer):
    with table(Always(1), []) as other:
        with pytest.raises(OptionError, match=f"port={visualizer.serve()} cannot be used"):
            other.serve(port=visualizer.serve())
        with pytest.raises(OptionError, match="port=70000: use 0 to 65535"):
            other.serve(port=70000)
        with pytest.raises(OptionError, match=r"bind_all=True.*ssh -L"):
            other.serve(bind_all=True)
        with pytest.raises(OptionError, match=r"no page yet.*Call serve"):
            _ = other.url


def test_only_loopback_listens(visualizer):
    port = visualizer.serve()
    listening = [
        line.split()[1]
        for table_ in ("/proc/net/tcp", "/proc/net/tcp6")
        for line in Path(table_).read_text().splitlines()[1:]
        if line.split()[3] == "0A" and line.split()[1].endswith(f":{port:04X}")
    ]
    assert listening == [f"0100007F:{port:04X}"]


def test_it_is_one_file_that_asks_for_nothing(tmp_path):
    path, visualizer = tmp_path / "new" / "page.html", table(table_model(), [numbers(1, None)])
    assert visualizer.snapshot(path) == path.read_text(encoding="utf-8")
    page = read_page(path)
    assert set(addresses(page)) == {"data:,", "#examples"}
    (style,), script = page.texts("style"), page.texts("script")[-1]
    assert digest(style) in page.policy and digest(script) in page.policy
    assert "connect-src" not in page.policy and "default-src 'none'" in page.policy
    shown = visualizer._repr_html_()  # in a notebook
    (page,) = re.findall(r'<iframe srcdoc="([^"]*)"', shown)
    assert html.unescape(page).startswith("<!doctype html>") and "src=" not in shown
    for classes in (0, -1, True, 1.5):
        with pytest.raises(OptionError, match="classes="):
            visualizer.snapshot(classes=classes)


def test_it_holds_the_examples_that_are_shown_and_their_classes(tmp_path):
    visualizer = table(table_model(), [numbers(1, 0, 2)])
    visualizer.config = FilterConfig("Saliency", num_examples=2, beside=[("Input X Gradient", {})])
    shown = visualizer.visualize()
    visualizer.snapshot(tmp_path / "page.html", classes=3)
    facts = read_page(tmp_path / "page.html").facts
    examples = facts["examples"]["examples"]
    assert [example["number"] for example in examples] == [1, 2]
    for example, outputs in zip(examples, shown, strict=True):
        for told, output in zip(example["models"], outputs, strict=True):
            found = told["feature_outputs"][0]["modified"]
            assert found == pytest.approx(output.feature_outputs[0].modified)
            for score in output.predicted[:3]:
                place = f"{example['id']},0,{output.method_index},{score.index}"
                assert facts["relevance"][place]["active_index"] == score.index
    assert len(facts["relevance"]) == 2 * 2 * 3
