// The scheduler's status page.
#include "byteps/observe/status_server.h"

#include <string>
#include <utility>

#include "byteps/base/invariant.h"
#include "byteps/base/log.h"
#include "byteps/base/wire.h"
#include "byteps/net/link/name_service.h"
#include "byteps/net/link/net_address.h"
#include "byteps/net/membership/event.h"
#include "byteps/observe/http_server.h"
#include "byteps/observe/status_board.h"
#include "byteps/observe/status_record.h"

namespace byteps {
namespace core {
// The served page. It requests /status every two seconds, and loads nothing else.
//
// Texts from nodes are inserted by textContent only, never as markup.
inline constexpr char kStatusPage[] = R"page(<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>BytePS cluster</title>
<style>
:root { color-scheme: light dark; --line: #8884; --soft: #8881; --good: #1a7f37; --bad: #cf222e;
        --warn: #9a6700; --blue: #0969da; --orange: #bc4c00; }
@media (prefers-color-scheme: dark) {
  :root { --good: #3fb950; --bad: #f85149; --warn: #d29922; --blue: #58a6ff; --orange: #f0883e; } }
body { font: 15px/1.45 system-ui, sans-serif; margin: 0 auto; max-width: 1180px; padding: 1.2rem; }
header { display: flex; gap: 1rem; align-items: baseline; flex-wrap: wrap; }
h1 { font-size: 1.35rem; margin: 0; }
h2 { font-size: 1.05rem; margin: 1.6rem 0 .4rem; }
.muted { opacity: .7; }
.state { font-weight: 600; padding: .1rem .6rem; border-radius: 1rem; border: 1px solid; }
.running, .active { color: var(--good); } .failed, .silent { color: var(--bad); }
.gathering { color: var(--warn); } .ended, .left { opacity: .7; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(215px, 1fr)); gap: .8rem;
         margin-top: 1rem; }
.card { border: 1px solid var(--line); border-radius: .5rem; padding: .6rem .8rem; }
.card b { display: block; font-size: 1.45rem; font-variant-numeric: tabular-nums; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: .28rem .6rem; text-align: right; border-bottom: 1px solid var(--line);
         white-space: pre; }
th { font-weight: 600; font-size: .82rem; opacity: .75; }
td.text, th.text { text-align: left; }
tr:hover td { background: var(--soft); }
.scroll { overflow-x: auto; }
#errors { padding-left: 1.2rem; } #errors time { opacity: .7; margin-right: .5rem; }
#lost { color: var(--bad); font-weight: 600; }
svg { width: 100%; height: 80px; border: 1px solid var(--line); border-radius: .5rem; }
polyline { fill: none; stroke-width: 2; vector-effect: non-scaling-stroke; }
.in { stroke: var(--blue); color: var(--blue); }
.out { stroke: var(--orange); color: var(--orange); stroke-dasharray: 6 4; }
</style>
</head>
<body>
<header>
  <h1>BytePS cluster</h1><span id="state" class="state"></span>
  <span id="about" class="muted"></span><span id="lost"></span>
</header>
<p id="reason" class="failed"></p>
<div class="cards">
  <div class="card">Servers<b id="servers"></b><span class="muted" id="servers-more"></span></div>
  <div class="card">Workers<b id="workers"></b><span class="muted" id="workers-more"></span></div>
  <div class="card">Into the servers<b id="rate-in"></b><span class="muted" id="total-in"></span></div>
  <div class="card">Out of the servers<b id="rate-out"></b><span class="muted" id="total-out"></span></div>
  <div class="card">Slowest worker<b id="slowest"></b><span class="muted" id="slowest-more"></span></div>
</div>
<h2>Bytes per second at the servers, since this page was opened:
  <span class="in">in</span>, <span class="out">out</span></h2>
<svg viewBox="0 0 300 80" preserveAspectRatio="none" role="img" aria-label="bytes per second">
  <polyline id="line-in" class="in"></polyline><polyline id="line-out" class="out"></polyline>
</svg>
<h2>Servers</h2><div class="scroll"><table id="server-table"></table></div>
<h2>Workers</h2><div class="scroll"><table id="worker-table"></table></div>
<h2>Last errors</h2><ul id="errors"></ul>
<p class="muted">Figures come with the heartbeats, every five seconds or less. The same as
  <a href="status">JSON</a> and <a href="status.txt">text</a>.</p>
<script>
"use strict";
const REFRESH_MS = 2000, POINTS = 150, MOST_ROWS = 500;
const at = (id) => document.getElementById(id);
const say = (id, text) => { at(id).textContent = text; };
function bytes(n) {
  const units = ["B", "kB", "MB", "GB", "TB", "PB"];
  let i = 0;
  while (n >= 999.5 && i + 1 < units.length) { n /= 1000; i += 1; }
  return `${n.toFixed(i === 0 || n >= 99.95 ? 0 : 1)} ${units[i]}`;
}
function age(s) {
  if (s < 120) return `${Math.round(s)} s`;
  if (s < 7200) return `${Math.round(s / 60)} min`;
  return `${(s / 3600).toFixed(1)} h`;
}
// Empty details for a node with a single NIC: the columns "in" and "out" show it.
function byNic(n) {
  if (n.nics < 2) return n.nics;
  return n.by_nic.map((one) => `${one.nic}: ${bytes(one.received_bytes_per_s)}/s in, ` +
    `${bytes(one.sent_bytes_per_s)}/s out`).join("\n");
}
const COMMON = [
  ["rank", (n) => n.rank, true], ["address", (n) => n.address, true],
  ["NICs", byNic], ["host", (n) => n.host, true],
  ["state", (n) => n.state, true, (n) => n.state], ["heard", (n) => `${age(n.silent_s)} ago`],
  ["in", (n) => `${bytes(n.received_bytes_per_s)}/s`], ["in, all", (n) => bytes(n.received_bytes)],
  ["out", (n) => `${bytes(n.sent_bytes_per_s)}/s`], ["out, all", (n) => bytes(n.sent_bytes)],
  ["tensors", (n) => n.tensors],
];
const SERVER = [...COMMON, ["keys", (n) => n.keys],
  ["sums/s", (n) => n.finished_per_s.toFixed(1)], ["open", (n) => n.running],
  ["adding, cores", (n) => n.adding_cores.toFixed(2)], ["failed", (n) => n.failed]];
const WORKER = [...COMMON, ["operations/s", (n) => n.finished_per_s.toFixed(1)],
  ["running", (n) => n.running], ["queued", (n) => n.queued], ["failed", (n) => n.failed]];
function table(id, columns, nodes) {
  const head = document.createElement("tr");
  for (const [title, , text] of columns) {
    const cell = document.createElement("th");
    cell.textContent = title;
    if (text) cell.className = "text";
    head.append(cell);
  }
  const rows = nodes.slice(0, MOST_ROWS).map((node) => {
    const row = document.createElement("tr");
    for (const [, value, text, mark] of columns) {
      const cell = document.createElement("td");
      cell.textContent = value(node);
      cell.className = (text ? "text " : "") + (mark ? mark(node) : "");
      row.append(cell);
    }
    return row;
  });
  at(id).replaceChildren(head, ...rows);
}
const history = { in: [], out: [] };
function draw(id, values, most) {
  const step = 300 / (POINTS - 1), from = POINTS - values.length;
  const points = values.map((v, i) => `${((from + i) * step).toFixed(1)},${(77 - 74 * v / most).toFixed(1)}`);
  at(id).setAttribute("points", points.join(" "));
}
function sum(nodes, name) { return nodes.reduce((all, node) => all + node[name], 0); }
function count(id, role) {
  say(id, `${role.active} of ${role.expected < 0 ? "?" : role.expected}`);
  say(`${id}-more`, role.left ? `${role.left} left the job` : "");
}
function show(status) {
  say("state", status.state);
  at("state").className = `state ${status.state}`;
  say("about", `scheduler ${status.scheduler} · up ${age(status.uptime_s)} · byteps ${status.version}`);
  say("reason", status.reason);
  count("servers", status.servers);
  count("workers", status.workers);
  const servers = status.nodes.filter((n) => n.role === "server");
  const workers = status.nodes.filter((n) => n.role === "worker");
  for (const [name, field] of [["in", "received"], ["out", "sent"]]) {
    const rate = sum(servers, `${field}_bytes_per_s`);
    say(`rate-${name}`, `${bytes(rate)}/s`);
    say(`total-${name}`, `${bytes(sum(servers, `${field}_bytes`))} in all`);
    history[name].push(rate);
    if (history[name].length > POINTS) history[name].shift();
  }
  const most = Math.max(1, ...history.in, ...history.out);
  draw("line-in", history.in, most);
  draw("line-out", history.out, most);
  const slow = status.slowest_worker;
  say("slowest", slow ? `worker ${slow.rank}` : "–");
  say("slowest-more", slow ? `last in ${(100 * slow.last_in).toFixed(0)} % of sums, ` +
      `by ${(1000 * slow.mean_wait_s).toFixed(1)} ms` : "no sums lately");
  table("server-table", SERVER, servers);
  table("worker-table", WORKER, workers);
  const errors = status.errors.map((error) => {
    const item = document.createElement("li"), time = document.createElement("time");
    time.textContent = error.time;
    item.append(time, `${error.node}: ${error.text}`);
    return item;
  });
  if (!errors.length) {
    const item = document.createElement("li");
    item.textContent = "none";
    errors.push(item);
  }
  at("errors").replaceChildren(...errors);
}
async function refresh() {
  try {
    const answer = await fetch("status", { cache: "no-store" });
    if (!answer.ok) throw new Error(`HTTP ${answer.status}`);
    show(await answer.json());
    say("lost", "");
  } catch (error) {
    say("lost", `the scheduler does not answer (${error.message}): these figures are old`);
  }
  setTimeout(refresh, REFRESH_MS);
}
refresh();
</script>
</body>
</html>
)page";

namespace {

// Restricts the page in the browser: the page may run its own script, and may send requests to this
// server only.
constexpr char kHeaders[] =
    "Cache-Control: no-store\r\n"
    "Content-Security-Policy: default-src 'self'; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline'\r\n";

HttpAnswer AnswerAt(const std::string& path, StatusBoard* board) {
  HttpAnswer answer;
  answer.headers = kHeaders;
  if (path == "/") {
    answer.type = "text/html; charset=utf-8";
    answer.body = kStatusPage;
  } else if (path == "/status") {
    answer.type = "application/json";
    answer.body = board->Json();
  } else if (path == "/status.txt") {
    answer.body = board->Text();
  } else {
    answer.status = 404;
    answer.body = "there are /, /status and /status.txt\n";
  }
  return answer;
}

}  // namespace

std::unique_ptr<StatusServer> StatusServer::Make(const Config& config, StatusBoard* board) {
  const long port = config.Int("BYTEPS_STATUS_PORT");
  if (port == 0) return nullptr;
  const std::string& given = config.String("BYTEPS_HTTP_HOST");
  const std::string host = given.empty() ? ps::LoopbackAddress() : given;
  const auto make = [&] {
    return std::unique_ptr<StatusServer>(new StatusServer(std::make_unique<HttpServer>(
        "status", std::vector<std::string>{host}, std::vector<std::string>{},
        static_cast<int>(port),
        [board](const std::string& path) { return AnswerAt(path, board); })));
  };
  try {
    return ps::AwaitHost(config.Float("BYTEPS_START_TIMEOUT_S"), make);
  } catch (const Error& e) {
    throw UsageError("BYTEPS_STATUS_PORT=" + std::to_string(port) + ": cannot listen at " +
                     e.what() +
                     "; is the port taken, or BYTEPS_HTTP_HOST no address of this "
                     "host?");
  }
}

StatusServer::StatusServer(std::unique_ptr<HttpServer> server) : server_(std::move(server)) {}
StatusServer::~StatusServer() = default;

}  // namespace core
}  // namespace byteps
