#!/usr/bin/env python3
"""Writes dashboards/*.json for Grafana: `python3 dashboards.py`. Change panels here: a test compares them.

Every router reports every replica. So figures of replicas are reduced by `max by (node, replica)` before a sum.
"""

import json
from pathlib import Path

from grafana import GREEN, RED, YELLOW, Panel, dashboard, stat, timeline, variable

FOLDER = Path(__file__).parent / "dashboards"
RATE = "[$__rate_interval]"
ROUTER = 'instance=~"$router"'
REPLICA = 'replica="$replica"'
TOKENS, TOKEN_RATE = "suffix: tokens", "suffix: tokens/s"
STATES = {
    0: ("starting, leaving or lost", "blue"),
    1: ("ready", GREEN),
    2: ("failed", RED),
    3: ("quarantined", "purple"),
    4: ("sleeping", "gray"),
}
LEVELS = {1: ("by text", YELLOW), 2: ("exactly", GREEN)}


def quantiles(histogram: str, *quantiles: float, selector: str = ROUTER) -> dict[str, str]:
    """Series of a histogram."""
    rate = f"sum by (le) (rate({histogram}_bucket{{{selector}}}{RATE}))"
    return {f"p{quantile * 100:g}": f"histogram_quantile({quantile:g}, {rate})" for quantile in quantiles}


def counted(counter: str, by: str, selector: str = ROUTER) -> dict[str, str]:
    """A counter's rate by one of its labels."""
    return {f"{{{{{by}}}}}": f"sum by ({by}) (rate({counter}{{{selector}}}{RATE}))"}


def rate_of(counter: str, selector: str = ROUTER) -> str:
    """A counter's rate over routers."""
    return f"sum(rate({counter}{{{selector}}}{RATE}))"


def each(expression: str) -> str:
    """A figure of replicas, once for each of them."""
    return f"max by (node, replica) ({expression})"


def engine_rate(counter: str, selector: str = "") -> str:
    """The rate of an engine's counter, over all replicas that the selector leaves."""
    return f"sum({each(f'rate({counter}{selector}{RATE})')})"


def own(gauge: str) -> str:
    """A gauge of the replica that was chosen."""
    return each(f"{gauge}{{{REPLICA}}}")


def share(part: str, whole: str) -> str:
    """A part as 0 to 1 of the whole; nothing where there is no whole."""
    return f"{part} / ({whole} > 0)"


def gpu(gauge: str) -> dict[str, str]:
    """A gauge of each GPU of the replica that was chosen."""
    return {"GPU {{gpu}}": f"hostler_agent_gpu_{gauge}{{{REPLICA}}}"}


STATE = (
    "hostler_replica_ready{0} + 2 * hostler_replica_failed{0}"
    " + 3 * hostler_replica_quarantined{0} + 4 * hostler_replica_sleeping{0}"
)

FIRST_BYTE = Panel(
    "First byte",
    "From a request's arrival to the first byte of its answer.",
    quantiles("hostler_first_byte_seconds", 0.5, 0.95, 0.99),
    "s",
)

FLEET = {
    "Now": [
        stat(
            "Ready replicas",
            "Replicas that can be sent requests.",
            f"sum({each('hostler_replica_ready')})",
            {0: RED, 1: GREEN},
        ),
        stat(
            "Known replicas",
            "Replicas whose agent is attached, or was lost in the last minute.",
            f"count({each('hostler_replica_ready')})",
        ),
        stat(
            "Failed or quarantined",
            "Replicas that an engine's failure keeps out of service. `hostler ps` says why.",
            f"sum({each('hostler_replica_failed + hostler_replica_quarantined')})",
            {0: GREEN, 1: RED},
        ),
        stat("In flight", "Requests in flight in the routers.", "sum(hostler_in_flight)"),
        stat(
            "Queued",
            "Requests that wait in the routers for a replica with room.",
            "sum(hostler_queued_requests)",
            {0: GREEN, 1: YELLOW},
        ),
        stat(
            "Crash suspects",
            "Requests that were in flight when an engine died, and were not answered since.",
            "max(hostler_crash_suspects)",
            {0: GREEN, 1: RED},
        ),
        timeline("Replicas", "What each replica does.", {"{{replica}}": each(STATE.format(""))}, STATES),
    ],
    "Requests": [
        Panel(
            "Answers",
            "Engines' answers by how they ended; a broken one had begun.",
            counted("hostler_answers_total", "outcome"),
            "reqps",
            stacked=True,
        ),
        Panel(
            "Refused",
            "Requests that got no engine's answer, by why.",
            counted("hostler_refused_total", "reason"),
            "reqps",
            stacked=True,
        ),
        FIRST_BYTE,
        Panel(
            "Retries",
            "Attempts beyond a request's first, as a share of all. They are bounded to a fifth of the requests.",
            {"retries": share(rate_of("hostler_retries_total"), rate_of("hostler_placements_total"))},
            "percentunit",
            steps={0: GREEN, 0.1: YELLOW},
        ),
        Panel(
            "Streams that lost their engine",
            "By the tier of the resumption, and whether they went on.",
            counted("hostler_resumptions_total", "outcome"),
            "reqps",
        ),
        Panel(
            "Pause of resumed streams",
            "From the loss of the engine to the first piece from another one.",
            quantiles("hostler_resumption_pause_seconds", 0.5, 0.95),
            "s",
        ),
    ],
    "Engines": [
        Panel(
            "Tokens",
            "Prompt tokens that all engines have processed, and tokens that they have generated.",
            {
                "prompt": engine_rate("hostler_replica_prompt_tokens_total"),
                "generated": engine_rate("hostler_replica_generation_tokens_total"),
            },
            TOKEN_RATE,
        ),
        Panel(
            "Requests in engines",
            "What all engines run, and what waits in them.",
            {
                "running": f"sum({each('hostler_replica_running')})",
                "waiting": f"sum({each('hostler_replica_waiting')})",
            },
        ),
        Panel(
            "KV use",
            "Share of each engine's KV blocks that is in use. Engines preempt requests where it reaches 100 %.",
            {"{{replica}}": each("hostler_replica_kv_use")},
            "percentunit",
            steps={0: GREEN, 0.9: YELLOW},
            most=1,
        ),
        Panel(
            "Time left",
            "Time until each agent leaves because its batch job ends.",
            {"{{node}}": "min by (node) (hostler_node_leaves_in_seconds)"},
            "s",
        ),
    ],
}

REPLICA_ROWS = {
    "State": [
        timeline(
            "State", "What the replica does.", {"{{replica}}": each(STATE.format(f"{{{REPLICA}}}"))}, STATES, width=16
        ),
        stat(
            "Starts",
            "Starts of the engine after its first one, in the time shown.",
            f"max(increase(hostler_replica_restarts_total{{{REPLICA}}}[$__range]))",
            {0: GREEN, 0.5: YELLOW, 2.5: RED},
        ),
        stat(
            "Findings",
            "Things that cost it speed; `hostler advise` has them.",
            f"max(hostler_replica_findings{{{REPLICA}}})",
            {0: GREEN, 1: YELLOW},
        ),
    ],
    "Load": [
        Panel(
            "Requests",
            "What the engine runs and what waits in it, and what of all routers is in flight there.",
            {
                "running": own("hostler_replica_running"),
                "waiting": own("hostler_replica_waiting"),
                "in flight": own("hostler_replica_in_flight"),
            },
        ),
        Panel(
            "KV use",
            "Share of the engine's KV blocks that is in use.",
            {"in use": own("hostler_replica_kv_use")},
            "percentunit",
            steps={0: GREEN, 0.9: YELLOW},
            most=1,
        ),
        Panel(
            "Tokens",
            "Prompt tokens that the engine has processed, and tokens that it has generated.",
            {
                name: engine_rate(f"hostler_replica_{counter}_tokens_total", f"{{{REPLICA}}}")
                for name, counter in (("prompt", "prompt"), ("generated", "generation"))
            },
            TOKEN_RATE,
        ),
        Panel(
            "Preemptions",
            "Requests that the engine has preempted for want of KV blocks.",
            {"preempted": engine_rate("hostler_replica_preemptions_total", f"{{{REPLICA}}}")},
            "reqps",
        ),
        Panel(
            "Speed of prompts, as learned",
            "Prompt tokens that it computes in a second, as each router has learned it; placement uses this.",
            {"{{instance}}": f"hostler_replica_prefill_rate{{{REPLICA}}}"},
            TOKEN_RATE,
        ),
        Panel(
            "Slowness",
            "How much slower than its learned speed it has lately been, for each router. 1 is as expected.",
            {"{{instance}}": f"hostler_replica_slowness{{{REPLICA}}}"},
            steps={0: GREEN, 2: YELLOW},
        ),
    ],
    "Prefix cache": [
        Panel(
            "Found in the cache",
            "Share of the tokens looked up in the engine's prefix cache that were there.",
            {
                "found": share(
                    engine_rate("hostler_replica_prefix_hits_total", f"{{{REPLICA}}}"),
                    engine_rate("hostler_replica_prefix_queries_total", f"{{{REPLICA}}}"),
                )
            },
            "percentunit",
            most=1,
        ),
        Panel(
            "Cached blocks",
            "KV blocks that each router's index has for it.",
            {"{{instance}}": f"hostler_replica_cached_blocks{{{REPLICA}}}"},
        ),
        timeline(
            "How the cache is known",
            "Exactly: from the engine's own events. By text: from what was sent there.",
            {"{{instance}}": f"hostler_replica_cache_level{{{REPLICA}}}"},
            LEVELS,
            width=8,
        ),
    ],
    "GPUs, where Prometheus reads the agents too": [
        Panel("Busy", "Part of the last second in which a kernel ran.", gpu("utilisation"), "percentunit", most=1),
        Panel("Memory", "Memory in use, by anybody.", gpu("memory_used_bytes"), "bytes"),
        Panel("Power", "Power that the GPU takes.", gpu("watts"), "watt"),
        Panel("Temperature", "Temperature of the GPU.", gpu("celsius"), "celsius"),
        Panel(
            "Held down",
            "Reasons for which the GPU's clocks are held down.",
            {"GPU {{gpu}}: {{reason}}": f"hostler_agent_gpu_throttled{{{REPLICA}}}"},
            most=1,
        ),
        Panel(
            "Memory faults",
            "Errors that could not be corrected since the driver was loaded, and rows that could not be replaced.",
            {
                "GPU {{gpu}}: uncorrected": f"hostler_agent_gpu_ecc_uncorrected_total{{{REPLICA}}}",
                "GPU {{gpu}}: row not replaced": f"hostler_agent_gpu_remap_failed{{{REPLICA}}}",
            },
            steps={0: GREEN, 1: RED},
        ),
    ],
}

EXACT = f'level="exact",{ROUTER}'
CLOSE = f'sum(rate(hostler_cached_tokens_error_bucket{{le="16.0",{ROUTER}}}{RATE}))'
NEAR = " - ".join(
    f'sum(rate(hostler_first_token_ratio_bucket{{le="{bound}",{ROUTER}}}{RATE}))' for bound in ("2.0", "0.5")
)

HITS, MISSES = (rate_of(f"hostler_prompt_segment_{what}_total") for what in ("hits", "misses"))

PLACEMENT = {
    "Cached tokens: predicted and actual": [
        Panel(
            "Placements",
            "Requests sent to a replica, by how its cache was known: exactly, by text, or not at all (by load).",
            counted("hostler_placements_total", "level"),
            "reqps",
            stacked=True,
        ),
        Panel(
            "Cached tokens",
            "Prompt tokens that were predicted to be cached, and those that engines said were, where caches are known "
            "exactly. Needs engines with --enable-prompt-tokens-details and clients that ask for usage.",
            {
                "predicted": rate_of("hostler_predicted_cached_tokens_total", EXACT),
                "actual": rate_of("hostler_actual_cached_tokens_total", EXACT),
            },
            TOKEN_RATE,
        ),
        Panel(
            "Predicted to within 16 tokens",
            "Share of the requests whose cached tokens were predicted so well, where caches are known exactly.",
            {"within 16": share(CLOSE, rate_of("hostler_cached_tokens_error_count"))},
            "percentunit",
            steps={0: RED, 0.9: YELLOW, 0.98: GREEN},
            most=1,
        ),
        Panel(
            "Error of the prediction",
            "By how many tokens the prediction was wrong.",
            quantiles("hostler_cached_tokens_error", 0.5, 0.9, 0.99),
            TOKENS,
        ),
        Panel(
            "Index and engines",
            "Times that a replica's whole cache was asked for because the router's index differed from it.",
            {"{{replica}}": f"sum by (replica) (increase(hostler_replica_cache_resyncs_total{{{ROUTER}}}{RATE}))"},
        ),
        Panel(
            "Index",
            "Memory of the affinity index of each router.",
            {"{{instance}}": f"hostler_index_bytes{{{ROUTER}}}"},
            "bytes",
        ),
    ],
    "First token: predicted and actual": [
        Panel(
            "First token",
            "From a stream's dispatch to its first token.",
            quantiles("hostler_first_token_seconds", 0.5, 0.95, 0.99),
            "s",
        ),
        Panel(
            "Time taken, as a multiple of the prediction",
            "1 is as predicted. Far above 1: engines are slower than what was learned of them.",
            quantiles("hostler_first_token_ratio", 0.1, 0.5, 0.9),
        ),
        Panel(
            "Predicted to within a factor of two",
            "Share of the streams whose first token took between half and twice the predicted time.",
            {"within a factor of two": share(f"({NEAR})", rate_of("hostler_first_token_ratio_count"))},
            "percentunit",
            most=1,
        ),
    ],
    "Prompts and tokenizers": [
        Panel(
            "Tokenizers",
            "Models by whether the router's tokenizer agrees with their engine. Others than proved are placed by text.",
            {name: f"sum(hostler_models_{name}{{{ROUTER}}})" for name in ("proved", "different", "unusable")},
        ),
        Panel(
            "Prompts",
            "Prompts turned into tokens, those that template or tokenizer refused, and those that came "
            "while all threads were busy. "
            "The latter two are placed by text.",
            {name: rate_of(f"hostler_prompts_{name}_total") for name in ("encoded", "failed", "busy")},
            "reqps",
        ),
        Panel(
            "Segments remembered",
            "Share of the segments of prompts whose tokens the router remembered, so that nothing was encoded.",
            {"remembered": share(HITS, f"({HITS} + {MISSES})")},
            "percentunit",
            most=1,
        ),
    ],
}

CLIENTS = {
    "What clients wait for": [
        FIRST_BYTE,
        Panel(
            "Answer",
            "From a request's arrival to the last byte of its answer.",
            quantiles("hostler_answer_seconds", 0.5, 0.95, 0.99),
            "s",
        ),
        Panel(
            "Wait in the queue",
            "How long requests waited for a replica with room, of those that had to.",
            quantiles("hostler_queue_seconds", 0.5, 0.95),
            "s",
        ),
        Panel("Queued", "Requests that wait in each router.", {"{{instance}}": f"hostler_queued_requests{{{ROUTER}}}"}),
        Panel(
            "Failed requests",
            "Share of the requests that found no room or ended in an error, without those that clients got wrong.",
            {
                "failed": share(
                    rate_of("hostler_requests_total", f'verdict=~"full|error",{ROUTER}'),
                    rate_of("hostler_requests_total", f'verdict=~"answered|full|error",{ROUTER}'),
                )
            },
            "percentunit",
            steps={0: GREEN, 0.01: RED},
        ),
        Panel(
            "Tokens",
            "Tokens of completed streams whose clients asked for usage.",
            {"generated": rate_of("hostler_completion_tokens_total")},
            TOKEN_RATE,
        ),
    ],
    "Tenants, where there are keys: the first 64 by name": [
        Panel(
            "Requests",
            "Requests that their limits let in.",
            counted("hostler_tenant_requests_total", "tenant"),
            "reqps",
            stacked=True,
        ),
        Panel(
            "In flight",
            "Requests in flight or queued in the routers.",
            {"{{tenant}}": f"sum by (tenant) (hostler_tenant_in_flight{{{ROUTER}}})"},
            stacked=True,
        ),
        Panel(
            "At a limit",
            "Requests that a limit did not let in, by tenant and limit.",
            {"{{tenant}}: {{limit}}": f"sum by (tenant, limit) (rate(hostler_tenant_refused_total{{{ROUTER}}}{RATE}))"},
            "reqps",
            steps={0: GREEN, 0.001: YELLOW},
        ),
        Panel(
            "Prompt tokens",
            "Prompt tokens of answers that have ended.",
            counted("hostler_tenant_prompt_tokens_total", "tenant"),
            TOKEN_RATE,
            stacked=True,
        ),
        Panel(
            "Generated tokens",
            "Tokens that were generated for those answers.",
            counted("hostler_tenant_generation_tokens_total", "tenant"),
            TOKEN_RATE,
            stacked=True,
        ),
    ],
    "Keys and limits": [
        Panel(
            "Without a valid key",
            "Requests with no key, or with one that is unknown, revoked, expired or not allowed this.",
            counted("hostler_refused_total", "reason", f'reason=~"no_key|wrong_key",{ROUTER}'),
            "reqps",
        ),
        Panel(
            "No room",
            "Requests refused because router or queue was full (`full`), or no replica could answer (`fleet`).",
            counted("hostler_refused_total", "reason", f'reason=~"full|fleet",{ROUTER}'),
            "reqps",
            steps={0: GREEN, 0.001: RED},
        ),
        Panel(
            "Key file",
            "0 while a router cannot use the changed key file: the keys before it stay valid, revoked ones too.",
            {"{{instance}}": f"hostler_key_file_usable{{{ROUTER}}}"},
            most=1,
        ),
        Panel(
            "Lost lines of the access log",
            "Lines that were lost because writing was stuck.",
            {"lost": f"sum(increase(hostler_access_log_dropped_total{{{ROUTER}}}{RATE}))"},
            steps={0: GREEN, 1: RED},
        ),
    ],
}


ROUTERS = variable("router", "Router", "hostler_in_flight", "instance", several=True)
DASHBOARDS = {
    "fleet": ("Hostler: fleet", "Whether the fleet serves, and what it does.", [ROUTERS], FLEET),
    "replica": (
        "Hostler: one replica",
        "One engine and its GPUs.",
        [variable("replica", "Replica", "hostler_replica_ready", "replica", several=False)],
        REPLICA_ROWS,
    ),
    "placement": (
        "Hostler: placement",
        "How well placement predicts: cached tokens and the time to the first token.",
        [ROUTERS],
        PLACEMENT,
    ),
    "clients": (
        "Hostler: clients and tenants",
        "What clients wait for, what tenants use, and why requests are refused.",
        [ROUTERS],
        CLIENTS,
    ),
}


def rendered() -> dict[str, str]:
    """The text of each file by its name."""
    return {f"{name}.json": json.dumps(dashboard(name, *rest), indent=2) + "\n" for name, rest in DASHBOARDS.items()}


if __name__ == "__main__":
    for file, text in rendered().items():
        (FOLDER / file).write_text(text)
