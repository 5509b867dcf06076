"""Where does a test get a browser that opens a page from disk as a reader would?

Debian's Chromium, headless, driven by its own chromedriver. It reaches no network: a page that wants something from
outside of itself gets an error, which the page's log shows. It ends with the test session.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

HOW_TO_GET = "apt-get install chromium chromium-driver"

WINDOW = (1400, 1000)
"""Width and height of what is seen, in CSS pixels."""

PAGE_SECONDS = 60
"""Longer than a page with megabytes of JavaScript takes to open on a loaded machine."""


class BrowserUnavailableError(Exception):
    """The programs are not on this machine."""


def find_programs() -> tuple[Path, Path]:
    """The browser and the driver that was made for it.

    Raises:
        BrowserUnavailableError: one is missing; it says how to get it.
    """
    found = {name: shutil.which(name) for name in ("chromium", "chromedriver")}
    missing = [name for name, path in found.items() if path is None]
    if missing:
        raise BrowserUnavailableError(f"no {' and no '.join(missing)} on the PATH: {HOW_TO_GET}")
    return Path(str(found["chromium"])), Path(str(found["chromedriver"]))


def start_browser(profile: Path) -> Chrome:
    """A browser with an empty profile below a folder, whose pages' logs `get_log("browser")` gives.

    Raises:
        BrowserUnavailableError: the programs are not on this machine.
    """
    from selenium.webdriver import Chrome, ChromeOptions, ChromeService

    browser, driver = find_programs()
    options = ChromeOptions()
    options.binary_location = str(browser)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    for word in (
        "--headless=new",
        f"--user-data-dir={profile}",
        f"--window-size={WINDOW[0]},{WINDOW[1]}",
        # No name has an address, and no address but that of the driver answers.
        "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
        "--disable-background-networking",
        "--disable-component-update",
        "--no-first-run",
        "--hide-scrollbars",
        # In a container /dev/shm may be 64 MB: too small for a page of charts.
        "--disable-dev-shm-usage",
        "--disable-gpu",
    ):
        options.add_argument(word)
    if os.geteuid() == 0:
        options.add_argument("--no-sandbox")  # Chromium starts for root in no other way
    options.add_experimental_option(
        "prefs", {"download.default_directory": str(profile / "downloads"), "download.prompt_for_download": False}
    )
    # Selenium is given both programs: left alone it downloads what it does not find.
    chrome = Chrome(options=options, service=ChromeService(executable_path=str(driver)))
    chrome.set_page_load_timeout(PAGE_SECONDS)
    return chrome
