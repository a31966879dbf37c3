"""The server as others see it: who is let in, what its answers say, and how it starts and ends."""

from __future__ import annotations

import base64
import http.client
import os
import socket
import time
from pathlib import Path

import pytest
from driving import PAGES, Dashboard, alive, opened, person, settled
from playwright.sync_api import Browser, expect


def answer(server: Dashboard, path: str, **headers: str) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    connection.request("GET", path, headers={name.replace("_", "-"): value for name, value in headers.items()})
    return connection.getresponse()


def upgraded(server: Dashboard, **headers: str) -> int:
    """Status of a WebSocket's handshake."""
    lines = {
        "Host": f"127.0.0.1:{server.port}",
        "Upgrade": "websocket",
        "Connection": "Upgrade",
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": base64.b64encode(os.urandom(16)).decode(),
        **headers,
    }
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as link:
        asked = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        link.sendall(f"GET /_stcore/stream HTTP/1.1\r\n{asked}\r\n".encode())
        return int(link.recv(1024).split(b" ", 2)[1])


def test_a_request_for_another_host_is_refused(dashboard: Dashboard) -> None:
    ours = answer(dashboard, "/", Host=f"127.0.0.1:{dashboard.port}")
    assert ours.status == 200 and b"<div" in ours.read()
    for host in ("evil.example", f"evil.example:{dashboard.port}", "127.0.0.1.evil.example", "0.0.0.0", "[::2]"):
        for path in ("/", "/overview", "/_stcore/health", "/_stcore/host-config"):
            refused = answer(dashboard, path, Host=host)
            assert refused.status in (400, 403, 421), (host, path, refused.status)
            assert b"<div" not in refused.read()


def test_a_page_of_another_origin_gets_no_connection(dashboard: Dashboard) -> None:
    assert upgraded(dashboard, Origin=dashboard.url) == 101
    for origin in ("http://evil.example", "null", "http://localhost.evil.example", "https://127.0.0.1:1"):
        assert upgraded(dashboard, Origin=origin) in (400, 403), origin
    assert upgraded(dashboard, Host="evil.example", Origin="http://evil.example") in (400, 403, 421)


def test_a_browser_gets_one_cookie_that_scripts_cannot_read(dashboard: Dashboard) -> None:
    first = answer(dashboard, "/")
    given = [value for name, value in first.getheaders() if name.lower() == "set-cookie" and "deepseal" in value]
    assert len(given) == 1
    assert {"HttpOnly", "SameSite=Strict", "Path=/"} <= {part.strip() for part in given[0].split(";")}
    again = answer(dashboard, "/", Cookie=given[0].partition(";")[0])
    assert not [v for name, v in again.getheaders() if name.lower() == "set-cookie" and "deepseal" in v]
    kept = {name.lower(): value for name, value in first.getheaders()}
    assert kept["x-content-type-options"] == "nosniff" and kept["x-frame-options"] == "SAMEORIGIN"
    assert kept["referrer-policy"] == "no-referrer"


def test_no_file_of_the_server_is_served(dashboard: Dashboard) -> None:
    secret = dashboard.cache / "dashboard" / "secret.txt"
    secret.parent.mkdir(parents=True, exist_ok=True)
    secret.write_text("a file of the server")
    climbs = (
        "/../../../../etc/passwd",
        "/app/static/../../secret.txt",
        "/media/../secret.txt",
        f"/{secret}",
        "//etc/passwd",
    )
    for path in (*climbs, "/component/../../etc/passwd", "/static/%2e%2e/%2e%2e/%2e%2e/etc/passwd"):
        body = answer(dashboard, path).read()
        assert b"a file of the server" not in body and b"root:" not in body, path


def test_nothing_is_loaded_from_elsewhere(chromium: Browser, dashboard: Dashboard) -> None:
    context = person(chromium)
    asked: list[str] = []
    context.on("request", lambda request: asked.append(request.url))
    page = opened(context.new_page(), dashboard)
    for name in PAGES:
        opened(page, dashboard, name)
    context.close()
    own = (dashboard.url, dashboard.url.replace("http", "ws", 1), "data:", "blob:", "about:")
    assert len(asked) > 10 and not [url for url in asked if not url.startswith(own)]


def test_ctrl_c_ends_it_and_its_work(chromium: Browser, tmp_path: Path) -> None:
    server = Dashboard(tmp_path).wait()
    try:
        context = person(chromium)
        page = opened(context.new_page(), server, "mark")
        settled(page)
        page.get_by_label("Passes over the data").fill("1000")
        page.get_by_role("button", name="Train", exact=True).click()
        expect(page.locator(".st-key-work-mark").get_by_role("progressbar")).to_be_visible()
        children = server.children()
        assert children
    finally:
        started = time.monotonic()
        code = server.stop()
    context.close()
    assert code in (0, 130) and time.monotonic() - started < 20
    end = time.monotonic() + 20
    while [pid for pid in children if alive(pid)] and time.monotonic() < end:
        time.sleep(0.1)
    assert not [pid for pid in children if alive(pid)]
    said = server.log.read_text()
    assert "Traceback" not in said, said
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", server.port))


@pytest.mark.parametrize(
    ("words", "said"),
    [(("--host", "0.0.0.0"), "--allow-remote"), (("absent",), "a folder of records")],
)
def test_what_it_refuses_is_said_in_one_line(tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    server = Dashboard(tmp_path, *words, records=None)
    assert server.process.wait(60) == 2
    lines = server.log.read_text().strip().splitlines()
    assert len(lines) == 1 and said in lines[0]
