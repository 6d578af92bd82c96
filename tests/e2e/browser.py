"""A headless Chromium, driven over its debugging protocol with nothing but the standard library."""

import base64
import json
import os
import shutil
import socket
import struct
import subprocess
import time
from pathlib import Path
from typing import Any

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "chrome")
START_S = 180.0
REPLY_S = 180.0
KEYS = {"Enter": (13, "\r"), "Tab": (9, ""), "Escape": (27, "")}


def find_browser() -> str | None:
    return next((found for name in PROGRAMS if (found := shutil.which(name))), None)


class Browser:
    """One page of a browser with a profile of its own. Ends with `close`."""

    def __init__(self, program: str, profile: Path, *, width: int = 1280, height: int = 800) -> None:
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-dev-shm-usage"]
        quiet = ["--disable-background-networking", "--disable-component-update", "--disable-sync", "--mute-audio"]
        self._process = subprocess.Popen(
            [
                program,
                *flags,
                *quiet,
                "--remote-debugging-port=0",
                f"--user-data-dir={profile}",
                f"--window-size={width},{height}",
                "about:blank",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            port, path = self._address(profile)
            self._socket = WebSocket(port, path)
            self._number = 0
            self.seen: list[dict[str, Any]] = []
            self._session: str | None = None
            target = self.call("Target.createTarget", url="about:blank")
            self._session = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)["sessionId"]
            for domain in ("Page", "Runtime", "Network", "DOM", "Log"):
                self.call(f"{domain}.enable")
        except BaseException:
            self._process.kill()
            self._process.wait(REPLY_S)
            raise

    def close(self) -> None:
        self._socket.close()
        self._process.kill()
        self._process.wait(REPLY_S)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """The result of a call; what the browser tells on the way is kept in `seen`."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        self._socket.send(json.dumps(message))
        deadline = time.monotonic() + REPLY_S
        while time.monotonic() < deadline:
            found = json.loads(self._socket.receive())
            if found.get("id") == self._number:
                assert "error" not in found, f"{method}: {found['error']}"
                result: dict[str, Any] = found["result"]
                return result
            self.seen.append(found)
        raise TimeoutError(f"the browser did not answer {method}")

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.wait(f"document.readyState === 'complete' && location.href.startsWith({url!r})")

    def evaluate(self, expression: str) -> Any:
        reply = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in reply, reply["exceptionDetails"]
        return reply["result"].get("value")

    def wait(self, expression: str, timeout_s: float = 120.0) -> Any:
        """The value of an expression once it is true."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if value := self.evaluate(expression):
                return value
            time.sleep(0.1)
        raise TimeoutError(f"never true: {expression}\n{self.evaluate('document.body.innerText')}")

    def choose_files(self, selector: str, *files: Path) -> None:
        """As if the user picked files in the dialog of an input."""
        root = self.call("DOM.getDocument")["root"]["nodeId"]
        node = self.call("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
        self.call("DOM.setFileInputFiles", nodeId=node, files=[str(file) for file in files])

    def type(self, selector: str, text: str) -> None:
        self.evaluate(f"document.querySelector({selector!r}).focus()")
        self.call("Input.insertText", text=text)

    def paste(self, selector: str) -> None:
        """What is on the clipboard, at the end of a text field."""
        self.evaluate(f"document.querySelector({selector!r}).focus()")
        self.call("Input.dispatchKeyEvent", type="rawKeyDown", key="v", code="KeyV", modifiers=2, commands=["paste"])
        self.call("Input.dispatchKeyEvent", type="keyUp", key="v", code="KeyV", modifiers=2)

    def press(self, key: str, *, shift: bool = False) -> None:
        """One of `KEYS`, down and up."""
        code, text = KEYS[key]
        event = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": 8 * shift}
        self.call("Input.dispatchKeyEvent", type="keyDown", **event, **({"text": text} if text else {}))
        self.call("Input.dispatchKeyEvent", type="keyUp", **event)

    def resize(self, width: int, height: int, *, is_phone: bool = False, scale: float = 1) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": is_phone}
        self.call("Emulation.setDeviceMetricsOverride", **size)

    def prefer(self, **features: str) -> None:
        """Media features such as prefers_color_scheme="dark"."""
        found = [{"name": name.replace("_", "-"), "value": value} for name, value in features.items()]
        self.call("Emulation.setEmulatedMedia", features=found)

    def screenshot(self) -> bytes:
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])

    def events(self, method: str) -> list[dict[str, Any]]:
        return [event["params"] for event in self.seen if event.get("method") == method]

    def _address(self, profile: Path) -> tuple[int, str]:
        file = profile / "DevToolsActivePort"
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and self._process.poll() is None:
            lines = file.read_text().splitlines() if file.exists() else []
            if len(lines) == 2:
                return int(lines[0]), lines[1]
            time.sleep(0.1)
        raise TimeoutError(f"the browser did not start (exit code {self._process.poll()})")


class WebSocket:
    """Text messages over a WebSocket, as a client."""

    def __init__(self, port: int, path: str) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=REPLY_S)
        key = base64.b64encode(os.urandom(16)).decode()
        head = f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        self._socket.sendall(f"{head}Sec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n".encode())
        self._file = self._socket.makefile("rb")
        status = self._file.readline()
        assert b"101" in status, status
        while self._file.readline() != b"\r\n":
            pass

    def send(self, text: str) -> None:
        data, mask = text.encode(), os.urandom(4)
        size = len(data)
        if size < 126:
            head = struct.pack("!BB", 0x81, 0x80 | size)
        elif size < 2**16:
            head = struct.pack("!BBH", 0x81, 0x80 | 126, size)
        else:
            head = struct.pack("!BBQ", 0x81, 0x80 | 127, size)
        masked = bytes(byte ^ mask[i % 4] for i, byte in enumerate(data))
        self._socket.sendall(head + mask + masked)

    def receive(self) -> str:
        """The next whole message."""
        parts = []
        while True:
            first, second = self._file.read(2)
            size = second & 0x7F
            if size >= 126:
                size = int.from_bytes(self._file.read(2 if size == 126 else 8), "big")
            data = self._file.read(size)
            if first & 0x0F in (0, 1):
                parts.append(data)
                if first & 0x80:
                    return b"".join(parts).decode()

    def close(self) -> None:
        self._file.close()
        self._socket.close()
