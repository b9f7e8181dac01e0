"""Makes the picture of the README, `docs/view.png`, from a run: `python docs/picture.py RUN`.

It needs Chromium (`apt-get install chromium`) and playwright.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

WIDTH, HEIGHT = 1200, 850
TARGET = Path(__file__).with_name("view.png")


def picture(url: str, target: Path) -> None:
    """Write what the first page of a view shows."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="light")
        page.goto(url)
        page.wait_for_selector("canvas")
        page.wait_for_load_state("networkidle")
        page.screenshot(path=target)
        browser.close()


if __name__ == "__main__":
    command = [sys.executable, "-m", "rlhf_pipeline", "view", *sys.argv[1:]]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        found = re.search(r"http://\S+", server.stdout.readline())
        assert found is not None
        picture(found[0], TARGET)
        server.terminate()
