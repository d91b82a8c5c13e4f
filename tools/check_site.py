"""Open every page of the built site in Chromium without a network, and search it.

``hatch run docs:build`` runs it after the build. Reported are errors of a page, among them what it fetches from
elsewhere; diagrams that are not drawn; pages that are higher than the goal; and queries that do not find a guide first.
Where Chromium is not installed (``bash tools/engines/chromium.sh``), it prints that nothing was checked.
"""

from __future__ import annotations

import argparse
import http.server
import shutil
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

ROOT = Path(__file__).parents[1]
_PATIENCE = 20.0  # seconds that a page has to draw its diagrams, or the search to answer
# Pixels that a page should at most be high on a screen that is 1,280 wide.
HIGHEST, HIGHEST_OF_REFERENCE = 6_000, 12_000
# What is searched for, and the pages of which one must be found first.
EXPECTED: Mapping[str, Sequence[str]] = {
    "OOM": ("troubleshooting",),
    "out of memory": ("troubleshooting",),
    "fsdp": ("fsdp",),
    "deepspeed": ("deepspeed",),
    "tpu": ("xla",),
    "multi node": ("multi-node",),
    "multi gpu": ("launching", "multi-node"),
    "slurm": ("clusters", "multi-node"),
    "sagemaker": ("clusters",),
    "restart": ("restarts",),
    "straggler": ("restarts",),
    "nccl": ("timeouts",),
    "timeout": ("timeouts",),
    "hang": ("timeouts", "troubleshooting"),
    "gradient accumulation": ("gradient-accumulation",),
    "cross entropy": ("chunked-cross-entropy",),
    "logits": ("chunked-cross-entropy",),
    "mixed precision": ("mixed-precision",),
    "bf16": ("mixed-precision",),
    "fp8": ("mixed-precision",),
    "gather_for_metrics": ("evaluation",),
    "save_state": ("checkpoints",),
    "resume": ("preemption", "checkpoints"),
    "preemption": ("preemption",),
    "s3": ("object-storage",),
    "safetensors": ("saving-models", "big-models"),
    "device map": ("big-models",),
    "cpu offload": ("big-models", "fsdp"),
    "quantization": ("quantization",),
    "lora": ("hugging-face",),
    "transformers": ("hugging-face",),
    "wandb": ("trackers",),
    "tensorboard": ("trackers",),
    "jupyter": ("notebooks",),
    "kubernetes": ("containers",),
    "docker": ("containers",),
    "gan": ("several-models",),
    "learning rate": ("learning-rate-schedules",),
    "muon": ("muon",),
    "torch.compile": ("compile",),
    "mfu": ("throughput",),
    "seed": ("reproducibility",),
    "mixture": ("data-mixtures",),
    "interleave_datasets": ("data-mixtures",),
}


def misses(found: Mapping[str, Sequence[str]]) -> list[str]:
    """A line for each query whose first page is none of the expected guides.

    Args:
        found: of each query the addresses of the pages, best first.
    """
    return [
        f"{query!r} finds {next(iter(found[query]), 'nothing')!r} first, not one of {', '.join(guides)}"
        for query, guides in EXPECTED.items()
        if not found[query] or found[query][0] not in {f"guides/{guide}/" for guide in guides}
    ]


def too_high(heights: Mapping[str, int]) -> list[str]:
    """A line for each page that is higher than it may be.

    Args:
        heights: pixels by the address of the page.
    """
    limits = {page: HIGHEST_OF_REFERENCE if page.startswith("reference/") else HIGHEST for page in heights}
    return [
        f"{page} is {height:,} pixels high, of at most {limits[page]:,}"
        for page, height in sorted(heights.items(), key=lambda item: -item[1])
        if height > limits[page]
    ]


def main() -> int:
    """Check a site, and print what is wrong with it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--site-dir", "-d", type=Path, default=ROOT / "site", help="the built site")
    site, _ = parser.parse_known_args()
    browser, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if browser is None or driver is None:
        print("site: not checked, because Chromium is not installed: bash tools/engines/chromium.sh")
        return 0
    pages = sorted(
        "" if page.parent == site.site_dir else f"{page.parent.relative_to(site.site_dir).as_posix()}/"
        for page in site.site_dir.rglob("index.html")
    )
    with _served(site.site_dir) as address, _chromium(browser, driver) as chrome:
        problems, heights = [], {}
        for page in pages:
            chrome.get(address + page)
            problems += [f"{page}: {text}" for text in _without_diagrams(chrome)]
            heights[page] = chrome.execute_script("return document.body.scrollHeight")
            problems += [f"{page}: {entry['message']}" for entry in chrome.get_log("browser")]
            if "mermaid.min.js" in chrome.page_source:  # what broke the search where it could not be fetched
                problems += (
                    [f"{page}: the search finds nothing"] if not _search(chrome, address, "fsdp") else []
                )
        chrome.get(address)
        found = {query: _search(chrome, address, query) for query in EXPECTED}
    missed = misses(found)
    print(*too_high(heights), *problems, *missed, sep="\n")  # heights are goals, and fail nothing
    print(
        f"site: {len(pages)} pages, {len(problems)} problems; {len(missed)} of {len(EXPECTED)} queries find something "
        "else first"
    )
    return 1 if problems or missed else 0


@contextmanager
def _served(folder: Path) -> Iterator[str]:
    """Serve a folder on this machine; gives its address."""

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args, directory=str(folder))

        def log_message(self, *args: Any) -> None:
            """Say nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@contextmanager
def _chromium(browser: str, driver: str) -> Iterator[Chrome]:
    """A browser that reaches this machine alone."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = browser
    options.set_capability("goog:loggingPrefs", {"browser": "WARNING"})
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--disable-dev-shm-usage",
        "--window-size=1280,900",
        "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
    ):
        options.add_argument(argument)
    chrome = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    try:
        yield chrome
    finally:
        chrome.quit()


def _without_diagrams(chrome: Chrome) -> list[str]:
    """Wait until the diagrams of the page are drawn; says which were not."""
    waiting = "return document.querySelectorAll('pre.mermaid').length"
    drawn = "return [...document.querySelectorAll('div.mermaid')].filter(it => it.clientHeight > 40).length"
    asked = chrome.page_source.count('class="mermaid"')
    end = time.monotonic() + _PATIENCE
    while chrome.execute_script(waiting) or chrome.execute_script(drawn) < asked:
        if time.monotonic() > end:
            return [f"{chrome.execute_script(drawn)} of {asked} diagrams are drawn"]
        time.sleep(0.05)
    return []


def _search(chrome: Chrome, address: str, query: str) -> list[str]:
    """What the search of the page that is open finds, as a reader types it: addresses of pages, best first."""
    chrome.execute_script(
        """
        document.querySelector(".md-search-result__meta").textContent = "asked";
        const input = document.querySelector(".md-search__input");
        input.focus(); input.value = arguments[0];
        for (const name of ["focus", "keyup", "input"]) input.dispatchEvent(new Event(name, {bubbles: true}));
        """,
        query,
    )
    end = time.monotonic() + _PATIENCE
    answer = "return document.querySelector('.md-search-result__meta').textContent"
    while not chrome.execute_script(answer).endswith((" documents", " document")):
        if time.monotonic() > end:
            return []
        time.sleep(0.02)
    found = chrome.execute_script(
        "return [...document.querySelectorAll('.md-search-result__item > a')].map(it => it.href)"
    )
    pages = [link.removeprefix(address).partition("?")[0].partition("#")[0] for link in found]
    return list(dict.fromkeys(pages))


if __name__ == "__main__":
    sys.exit(main())
