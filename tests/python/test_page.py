"""The router's page in a real browser: replicas that come, die and come back, a request explained, orders with a
question first, hostile names, the keyboard, and what axe finds. Left out where there is no Chromium.

axe-core is fetched by npm into the cache, once; where it cannot be had, its test is left out.
"""

import json
import os
import shutil
import signal
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import pytest

from browser import Browser, chromium
from fleet import Up, cache_folder
from processes import Process, ask, binary, environment, wait_until

pytestmark = pytest.mark.skipif(chromium() is None, reason="there is no Chromium here: apt-get install chromium")

AXE = "axe-core@4.14.1"
# How long npm may take, in seconds.
NPM_SECONDS = 120
HOSTILE = "<img src=x onerror=document.title='owned'>"
LIGHT, DARK, NARROW = (1440, 900, "light"), (1440, 900, "dark"), (390, 844, "light")


@pytest.fixture
def folder():
    """A folder with a short path: sockets are in it. HOSTLER_SCREENSHOTS keeps the pictures."""
    path = Path(tempfile.mkdtemp(prefix="h-", dir="/tmp"))
    yield path
    if kept := os.environ.get("HOSTLER_SCREENSHOTS"):
        Path(kept).mkdir(parents=True, exist_ok=True)
        for picture in path.glob("*.png"):
            shutil.copy(picture, kept)
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def browser(folder):
    """A browser without complaints at its end."""
    running = Browser(folder)
    yield running
    running.close()
    assert not running.complaints, running.complaints


@pytest.fixture
def up(folder):
    """Two simulated engines that answer to a hostile name beside their own."""
    running = Up(folder, ["--served-model-name", "tiny", HOSTILE, "--sim-step-ms", "20"])
    yield running
    running.stop()


def address(up: Process, *flags: str) -> str:
    """What `hostler page` prints."""
    return ask("page", "--no-open", "--admin", up.socket, *flags).strip()


def chat(up: Up, **more) -> str:
    """Sends a request, and returns its number."""
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Say something about locomotives"}],
        "stream": True,
        "max_tokens": 8,
    }
    headers = more.pop("headers", {})
    answer = httpx2.post(f"{up.edge}/chat/completions", json=body | more, headers=headers, timeout=30)
    assert answer.status_code == 200, answer.text
    return answer.headers["x-hostler-id"]


def say(browser: Browser, text: str) -> None:
    """Types a message into the chat, and sends it with Enter."""
    browser.evaluate("document.getElementById('chat-text').focus()")
    browser.call("Input.insertText", text=text)
    browser.press("Enter")


def shown(selector: str) -> str:
    """JavaScript: the text that an element shows."""
    return f"document.querySelector({json.dumps(selector)})?.innerText ?? ''"


def has(selector: str, text: str) -> str:
    """JavaScript: whether the element shows this text."""
    return f"({shown(selector)}).includes({json.dumps(text)})"


def test_a_browser_is_let_in_once_and_stays_in(up, browser):
    once = address(up)
    browser.open(once)
    browser.wait(has("#health", "2 of 2 replicas ready · simulated"))
    assert browser.evaluate("location.href").endswith(f"{once.split('/#')[0]}/"), "the token is out of sight"
    assert browser.evaluate("document.cookie") == ""
    browser.call("Page.reload")
    browser.wait(has("#health", "2 of 2 replicas ready"))
    browser.evaluate("sessionStorage.clear()")
    browser.open("about:blank")
    browser.open(once)
    browser.wait(has("#refusal", "hostler page"))
    assert "Fleet" not in browser.evaluate("document.body.innerText")
    # The console says that the answer was 403, as it should.
    browser.complaints = [words for words in browser.complaints if "403" not in words]


def test_the_page_explains_a_request_and_escapes_hostile_names(up, browser, folder):
    browser.look(*LIGHT)
    browser.open(address(up))
    browser.wait(has("#requests", "No request has come yet"))
    browser.screenshot(folder / "page-empty.png")
    for index in range(12):
        chat(up, headers={"x-request-id": HOSTILE} if index == 0 else {})
    first = chat(up, model=HOSTILE, headers={"x-request-id": HOSTILE})
    browser.wait("document.querySelectorAll('#requests tbody button').length >= 13")
    browser.click("#requests tbody button")
    browser.wait(has("#explained", f"id {first}"))
    browser.wait("document.querySelectorAll('#explained .cost-bar').length === 2")
    browser.wait(
        "[...document.querySelectorAll('#explained .compare')].some((one) => one.innerText.includes('actual'))"
    )
    told = browser.evaluate(shown("#explained"))
    assert HOSTILE in told, "the client's id and the model's name"
    browser.wait(has("#demand", HOSTILE))
    assert browser.evaluate("document.querySelectorAll('main img').length") == 0
    assert "owned" not in browser.evaluate("document.title")
    for width, height, scheme in (LIGHT, DARK, NARROW):
        browser.look(width, height, scheme)
        browser.wait(f"innerWidth === {width}")
        assert browser.evaluate("document.documentElement.scrollWidth") <= width, "nothing is wider than the window"
        browser.screenshot(folder / f"page-{scheme}-{width}.png", whole=width < 1000)


def test_the_page_tells_of_what_it_cannot_show(up, browser):
    browser.open(address(up))
    browser.wait(has("#health", "2 of 2 replicas ready"))
    watch = "watch(() => { throw new TypeError('no such column'); }, (words) => words === 'live' || resolve(words))"
    told = browser.evaluate(f"import('/page/session.js').then(({{ watch }}) => new Promise((resolve) => {watch}))")
    assert told == "no such column"


def test_an_engine_dies_and_comes_back_before_the_viewers_eyes(up, browser, folder):
    browser.look(*LIGHT)
    browser.open(address(up))
    browser.wait(has("#health", "2 of 2 replicas ready"))
    victim = up.replicas()[0]
    os.kill(victim.engine_pid, signal.SIGKILL)
    browser.wait(has("#events", f"{victim.id} ready →"))
    browser.wait(has("#events", "→ ready"))
    browser.wait(has("#health", "2 of 2 replicas ready"))
    browser.screenshot(folder / "page-died.png")
    browser.evaluate("sessionStorage.clear()")
    browser.open("about:blank")
    browser.open(address(up))
    browser.wait(has("#events", f"{victim.id} ready → failed"))
    told = browser.evaluate(shown("#events"))
    assert "has begun" in told and "→ ready" in told, "who opens the page later learns of it too"


def test_a_filter_shows_few_replicas_and_each_has_its_hour_and_its_log(up, browser):
    browser.open(address(up))
    browser.wait("document.querySelectorAll('.tile').length === 2")
    browser.evaluate("document.getElementById('filter').focus()")
    browser.call("Input.insertText", text="/1 READY")
    browser.wait("document.querySelectorAll('.tile').length === 1")
    assert browser.evaluate(shown("#filter-note")) == "1 of 2"
    browser.evaluate("document.querySelector('.tile').focus()")
    browser.press("Enter")
    browser.wait("document.querySelectorAll('dialog .hour .plot').length === 4")
    browser.click("dialog.detail details summary")
    browser.wait(has("dialog .log", "Application startup complete"))
    browser.press("Escape")
    browser.evaluate("document.getElementById('filter').select()")
    browser.call("Input.insertText", text="no such name")
    browser.wait(has("#hosts", "No replica matches"))


def test_the_status_of_each_of_the_last_requests_is_shown(folder, browser, tmp_path):
    erring = Up(tmp_path, ["--served-model-name", "tiny", "--sim-err-on", "indigestible"], engines=1)
    try:
        chat(erring)
        body = {"model": "tiny", "prompt": "indigestible", "max_tokens": 2}
        assert httpx2.post(f"{erring.edge}/completions", json=body, timeout=30).status_code == 500
        browser.open(address(erring))
        browser.wait("document.querySelectorAll('#requests tbody tr').length === 2")
        last = "[...document.querySelectorAll('#requests tbody tr')].map((row) => row.lastElementChild.innerText)"
        assert browser.evaluate(last) == ["500", "200"]
        assert browser.evaluate("document.querySelectorAll('#requests td.grave').length") == 1
        browser.wait(has("#explained", "answer 500"))
    finally:
        browser.open("about:blank")
        erring.stop()


def test_what_was_used_is_shown_and_no_more_is_cached_than_there_is(folder, browser, tmp_path):
    used = Up(tmp_path, ["--served-model-name", "tiny"], engines=1, options=["--usage-dir", str(tmp_path / "usage")])
    try:
        for _ in range(3):
            body = {"model": "tiny", "prompt": "a " * 40, "max_tokens": 4, "ignore_eos": True}
            assert httpx2.post(f"{used.edge}/completions", json=body, timeout=30).status_code == 200
        browser.open(address(used))
        browser.wait("document.querySelectorAll('#requests tbody tr').length === 3")
        # Files are written each second, and the page reads them once in ten.
        def rows() -> list[dict]:
            return [row for file in tmp_path.glob("usage/*/tokens-*.json") for row in json.loads(file.read_text())]

        wait_until(lambda: sum(row["requests"] for row in rows()) == 3, 30, "the requests are written down")
        browser.evaluate("document.getElementById('usage-numbers').open = true")
        browser.wait(has("#usage", "no tenant"))
        row = browser.evaluate("document.querySelectorAll('#usage table')[1].querySelector('tbody tr').innerText").split()
        assert (row[-5:-3], row[-1]) == (["3", "0"], "12"), row
        shares = browser.evaluate("[...document.querySelectorAll('#requests tbody tr')].map((row) => row.children[3].innerText)")
        assert shares and all(int(share.split()[0]) <= 100 for share in shares), shares
    finally:
        browser.open("about:blank")
        used.stop()


def test_an_order_asks_first_and_a_watcher_has_none(up, browser):
    browser.open(address(up))
    replica = up.replicas()[0].id
    browser.wait(has("#health", "2 of 2 replicas ready"))
    browser.click(".tile")
    browser.click("dialog.detail .orders button")
    browser.wait(has("dialog.question", f"Drain {replica}?"))
    browser.press("Escape")
    browser.wait("!document.querySelector('dialog.question')")
    assert [one.phase for one in up.replicas()] == ["ready", "ready"], "nothing happens without a yes"
    browser.click("dialog.detail .orders button")
    browser.click("dialog.question .danger")
    browser.wait(has("#events", f"an operator orders: drain {replica}"))
    browser.wait(has("#health", "1 of 2 replicas ready"))
    browser.evaluate("sessionStorage.clear()")
    browser.open("about:blank")
    browser.open(address(up, "--watch"))
    browser.wait(has("#rights", "watching only"))
    browser.wait(has("#health", "1 of 2 replicas ready"))
    browser.click(".tile")
    browser.wait("!!document.querySelector('dialog.detail .facts')")
    assert not browser.evaluate("!!document.querySelector('dialog .orders button')")
    assert not browser.evaluate("!!document.querySelector('dialog .log')"), "what engines write is for operators"


def test_the_keyboard_reaches_replicas_and_requests(up, browser):
    chat(up)
    chat(up)
    browser.open(address(up))
    browser.wait("document.querySelectorAll('#requests tbody button').length >= 2")
    browser.wait("document.querySelectorAll('.tile').length === 2")
    focused = "document.activeElement.className + ' ' + document.activeElement.textContent"

    def tab_until(condition: str) -> None:
        for _ in range(30):
            browser.press("Tab")
            if browser.evaluate(condition):
                return
        raise AssertionError(f"{condition} after thirty tabs; focus is on {browser.evaluate(focused)}")

    tab_until("!!document.activeElement.closest('#hosts')")
    while "tile" not in browser.evaluate(focused):
        browser.press("ArrowRight")
    one = browser.evaluate(focused)
    browser.press("ArrowRight")
    assert browser.evaluate(focused) != one, "an arrow goes on to the next replica"
    browser.press("Enter")
    browser.wait("document.querySelector('dialog.detail')?.open")
    browser.press("Escape")
    browser.wait("!document.querySelector('dialog')")
    assert "tile" in browser.evaluate(focused), "focus is back where it was"
    tab_until("!!document.activeElement.closest('#requests tbody')")
    browser.press("ArrowDown")
    browser.press("Enter")
    browser.wait("document.querySelectorAll('#requests tr')[2].classList.contains('picked')")


def test_the_page_tells_of_a_router_that_is_gone(up, browser):
    browser.open(address(up))
    browser.wait(has("#health", "2 of 2 replicas ready"))
    os.kill(up.child.pid, signal.SIGSTOP)
    try:
        browser.wait(has("#connection", "trying again"))
        assert browser.evaluate("document.documentElement.classList.contains('stale')")
    finally:
        os.kill(up.child.pid, signal.SIGCONT)
    browser.wait(has("#connection", "live"))
    browser.wait(has("#events", "the router answers again"))


def test_the_users_browser_is_given_a_file(up, folder):
    seen = folder / "seen"
    runtime = folder / "run"
    (runtime / "hostler").mkdir(parents=True)
    for path in (runtime, runtime / "hostler"):
        path.chmod(0o700)
    script = folder / "browser"
    script.write_text(f'#!/bin/sh\n{{ echo "$@"; cat "$1"; }} > {seen}.new && mv {seen}.new {seen}\n')
    script.chmod(0o755)
    # By its setting, as the router's own user has it: a socket that is named may come from another host.
    variables = environment() | {"BROWSER": str(script), "XDG_RUNTIME_DIR": str(runtime)}
    variables["HOSTLER_ROUTER_OPERATORS_SOCKET"] = up.socket
    command = [binary(), "page"]
    printed = subprocess.run(
        command, capture_output=True, text=True, env=variables, timeout=20, check=True
    ).stdout.strip()
    words, page = wait_until(lambda: seen.exists() and seen.read_text(), 10, "the browser ran").split("\n", 1)
    assert printed in page and "#token=" not in words, "the token is in no command line"
    assert Path(words).stat().st_mode & 0o777 == 0o600


@pytest.fixture(scope="session")
def axe() -> str:
    """The script of axe-core."""
    place = cache_folder() / "axe" / AXE
    script = place / "node_modules" / "axe-core" / "axe.min.js"
    if not script.exists():
        npm = shutil.which("npm")
        if npm is None:
            pytest.skip("there is no npm to fetch axe-core with")
        place.mkdir(parents=True, exist_ok=True)
        command = [npm, "install", "--prefix", place, "--no-save", "--ignore-scripts", "--no-audit", "--no-fund", AXE]
        fetched = subprocess.run(command, capture_output=True, text=True, timeout=NPM_SECONDS, check=False)
        if fetched.returncode:
            pytest.skip(f"axe-core cannot be fetched: {fetched.stderr.strip()[-300:]}")
    return script.read_text()


def test_axe_finds_nothing(up, browser, axe):
    """In light and dark, on the page, in its dialogs, with its tables open, and where one signs in."""
    chat(up)
    # The script of axe is no file of the page's.
    browser.call("Page.setBypassCSP", enabled=True)
    findings = {}

    def look(name: str) -> None:
        browser.evaluate(axe + "; undefined")
        told = "(one) => [one.id, one.nodes.map((node) => node.html.slice(0, 200))]"
        found = browser.evaluate(f"axe.run(document).then((all) => all.violations.map({told}))")
        if found:
            findings[name] = found

    for scheme in ("light", "dark"):
        browser.look(1440, 900, scheme)
        browser.open("about:blank")
        browser.open(address(up))
        browser.wait(
            "!!document.querySelector('#explained .cost-bar') && document.querySelectorAll('.tile').length === 2"
        )
        look(scheme)
        say(browser, "Say something about locomotives")
        browser.wait(has("#chat-log", "prompt tokens cached"))
        look(f"{scheme}, a conversation")
        browser.evaluate("for (const one of document.querySelectorAll('details')) one.open = true")
        browser.wait("!!document.querySelector('#fleet-numbers table')")
        look(f"{scheme}, tables")
        browser.click(".tile")
        browser.wait("!!document.querySelector('dialog.detail .facts')")
        look(f"{scheme}, a replica")
        browser.click("dialog.detail .orders button")
        look(f"{scheme}, a question")
        browser.evaluate("sessionStorage.clear()")
        browser.open("about:blank")
        browser.open(address(up).split("#")[0])
        browser.wait("!document.getElementById('sign-in').hidden")
        look(f"{scheme}, signing in")
    assert not findings, json.dumps(findings, indent=1)


def test_a_storm_of_refusals_is_red_although_every_replica_is_ready(browser, folder, tmp_path):
    bound = ["--max-num-seqs", "1", "--max-num-queued-reqs", "1"]
    storm = Up(tmp_path, ["--served-model-name", "tiny", *bound], options=["--max-queued", "1"])
    try:
        body = {"model": "tiny", "prompt": "a b c", "max_tokens": 100}
        with ThreadPoolExecutor(24) as pool:
            asked = [pool.submit(httpx2.post, f"{storm.edge}/completions", json=body, timeout=60) for _ in range(24)]
            refused = sum(answer.result().status_code != 200 for answer in asked)
        browser.look(*LIGHT)
        browser.open(address(storm))
        browser.wait(has("#health", "requests fail · 2 of 2 replicas ready"))
        browser.wait(has("#attention-list", f"{refused} found the router full"))
        assert browser.evaluate("!!document.querySelector('.bar.troubled')"), "the header is red"
        refusals = ThreadPoolExecutor(24)
        still = [refusals.submit(httpx2.post, f"{storm.edge}/completions", json=body, timeout=60) for _ in range(24)]
        browser.wait("!!document.querySelector('#flow .troubled')")
        assert "no room" in browser.evaluate(shown("#flow .troubled"))
        refusals.shutdown()
        assert any(answer.result().status_code != 200 for answer in still)
        browser.wait(has("#events", "requests-fail"))
        for width, height, scheme in (LIGHT, NARROW):
            browser.look(width, height, scheme)
            browser.wait(f"innerWidth === {width}")
            assert browser.evaluate("document.documentElement.scrollWidth") <= width, "nothing is wider than the window"
            browser.screenshot(folder / f"page-storm-{width}.png")
    finally:
        browser.open("about:blank")
        storm.stop()


def test_a_model_is_asked_on_the_page_which_says_where_the_answer_came_from(up, browser, folder):
    browser.look(*LIGHT)
    browser.open(address(up))
    browser.wait("document.querySelectorAll('#chat-model option').length === 2")
    browser.evaluate("document.getElementById('chat-model').value = 'tiny'")
    browser.evaluate("document.getElementById('chat-model').dispatchEvent(new Event('change'))")
    say(browser, "Say something about locomotives")
    browser.wait(has("#chat-log .turn.assistant", "prompt tokens cached"))
    told = browser.evaluate(shown("#chat-log .turn.assistant .note"))
    assert any(replica.id in told for replica in up.replicas()) and "first token after" in told, told
    browser.wait("document.querySelectorAll('#explained .cost-bar').length === 2")
    say(browser, "And of rails?")
    browser.wait("document.querySelectorAll('#chat-log .turn.assistant .note').length === 2")
    assert len(browser.evaluate("[...document.querySelectorAll('#chat-log .words')].at(-1).innerText")) > 0
    browser.click("#chat details summary")
    line = browser.evaluate(shown("#chat-curl"))
    answered = subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=30, check=True).stdout
    assert json.loads(answered)["object"] == "chat.completion", "the line for a terminal works as it is"
    browser.evaluate("document.querySelector('#chat details').open = false")
    browser.screenshot(folder / "page-chat.png")
    browser.evaluate("sessionStorage.clear()")
    browser.open("about:blank")
    browser.open(address(up, "--watch"))
    browser.wait(has("#rights", "watching only"))
    assert browser.evaluate("document.getElementById('chat').hidden"), "who may only watch asks nothing"
    answer = browser.evaluate(
        "import('/page/session.js').then(({ askEdge }) => askEdge({})).then(({ status }) => status)"
    )
    assert answer == 403
    browser.complaints = [words for words in browser.complaints if "403" not in words]


def test_a_stopped_answer_ends_at_its_engine(folder, browser, tmp_path):
    slow = Up(tmp_path, ["--served-model-name", "tiny", "--sim-step-ms", "200"], engines=1)
    try:
        browser.open(address(slow))
        browser.wait("!!document.querySelector('#chat-model option')")
        say(browser, "Count to a thousand")
        browser.wait("document.querySelector('#chat-log .turn.assistant .words')?.innerText.length > 0")
        assert slow.in_flight() == 1
        browser.evaluate("document.getElementById('chat-stop').focus()")
        browser.press("Enter")
        browser.wait(has("#chat-log .turn.assistant", "stopped"))
        wait_until(lambda: slow.in_flight() == 0, 10, "the engine has stopped")
        browser.wait(has("#explained", "left"))
    finally:
        browser.open("about:blank")
        slow.stop()


def test_requests_that_no_replica_got_are_among_the_last_ones(up, browser):
    chat(up)
    for _ in range(3):
        unknown = {"model": "no-such-model", "messages": [{"role": "user", "content": "a secret"}]}
        assert httpx2.post(f"{up.edge}/chat/completions", json=unknown, timeout=30).status_code == 404
    browser.open(address(up))
    browser.wait(has("#requests", "404 ×3"))
    browser.wait(has("#explained", "model no-such-model"))
    assert "a secret" not in browser.evaluate("document.body.innerText")
    browser.wait(has("#requests", "200"))


def test_where_the_router_has_keys_the_chat_asks_with_one(folder, browser, tmp_path):
    made = ("keys", "create", "--file", str(folder / "keys.toml"))
    ask(*made, "--tenant", "physics", "--out", str(folder / "user"))
    ask(*made, "--role", "admin", "--tenant", "operators", "--out", str(folder / "admin"))
    keyed = Up(tmp_path, ["--served-model-name", "tiny"], engines=1, options=["--keys-file", str(folder / "keys.toml")])
    try:
        opened = address(keyed)
        browser.open(opened)
        browser.wait("document.getElementById('chat-key-field').hidden === false")
        browser.evaluate("document.getElementById('chat-key').value = 'wrong'")
        say(browser, "Hello")
        browser.wait(has("#chat-log .failure", "this key is not known here"))
        key = (folder / "user").read_text().strip()
        browser.evaluate(f"document.getElementById('chat-key').value = {json.dumps(key)}")
        say(browser, "Hello")
        browser.wait(has("#chat-log", "prompt tokens cached"))
        browser.wait(has("#requests", "refused: unauthenticated"))
        stored = browser.evaluate(
            "JSON.stringify([localStorage, sessionStorage]) + document.getElementById('page').innerText"
        )
        assert key not in stored, "it is in this tab's memory alone"
        browser.evaluate("sessionStorage.clear()")
        browser.open("about:blank")
        browser.open(opened.split("#")[0])
        browser.wait("!document.getElementById('sign-in').hidden")
        admin = (folder / "admin").read_text().strip()
        browser.evaluate(f"document.getElementById('key').value = {json.dumps(admin)}")
        browser.click("#key-form button")
        words = json.dumps(f"asks with the key {admin.split('_')[1]}")
        browser.wait(f"document.getElementById('chat-access').textContent.includes({words})")
        assert browser.evaluate("document.getElementById('chat-key-field').hidden"), "the session has a key"
        say(browser, "Hello")
        browser.wait(has("#chat-log", "prompt tokens cached"))
        browser.complaints = [words for words in browser.complaints if "401" not in words]
    finally:
        browser.open("about:blank")
        keyed.stop()
