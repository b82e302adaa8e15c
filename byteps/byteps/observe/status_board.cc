#include "byteps/observe/status_board.h"

#include <algorithm>
#include <cstdarg>
#include <cstdio>

#include "byteps/base/log.h"
#include "byteps/cluster/channel.h"
#include "byteps/net/link/net_address.h"
#include "byteps/observe/status_record.h"

namespace byteps {
namespace core {
namespace {

constexpr size_t kProblems = 20;
constexpr size_t kTextRows = 200;

// Builds a JSON object, with its members in order.
class JsonObject {
 public:
  JsonObject& Text(const char* name, const std::string& value) {
    return Raw(name, ps::JsonText(value));
  }
  JsonObject& Number(const char* name, uint64_t value) { return Raw(name, std::to_string(value)); }
  JsonObject& Signed(const char* name, int64_t value) { return Raw(name, std::to_string(value)); }
  JsonObject& Real(const char* name, double value) {
    char text[40];
    snprintf(text, sizeof(text), "%.6g", value);
    return Raw(name, text);
  }
  JsonObject& Raw(const char* name, const std::string& value) {
    members_ += (members_.empty() ? "\"" : ",\"") + std::string(name) + "\":" + value;
    return *this;
  }
  std::string Done() const { return "{" + members_ + "}"; }

 private:
  std::string members_;
};

template <typename Items, typename Write>
std::string JsonList(const Items& items, Write write) {
  std::string out = "[";
  for (const auto& item : items) out += (out.size() == 1 ? "" : ",") + write(item);
  return out + "]";
}

const char* NameOf(ps::JobView::Phase phase) {
  switch (phase) {
    case ps::JobView::kGathering:
      return "gathering";
    case ps::JobView::kRunning:
      return "running";
    case ps::JobView::kFailed:
      return "failed";
    case ps::JobView::kEnded:
      return "ended";
  }
  return "";
}

int64_t UnixMs() {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::milliseconds>(now).count();
}

std::string TimeText(int64_t unix_ms) { return ps::UtcText(unix_ms / 1000) + "Z"; }

std::string Format(const char* format, ...) __attribute__((format(printf, 1, 2)));
std::string Format(const char* format, ...) {
  char text[512];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof(text), format, arguments);
  va_end(arguments);
  return text;
}

// Returns "1.2 GB"; for rates with "/s".
std::string Bytes(double bytes) {
  static const char* const kUnits[] = {"B", "kB", "MB", "GB", "TB", "PB"};
  size_t unit = 0;
  while (bytes >= 999.5 && unit + 1 < sizeof(kUnits) / sizeof(kUnits[0])) {
    bytes /= 1000;
    ++unit;
  }
  return Format(unit == 0 || bytes >= 99.95 ? "%.0f %s" : "%.1f %s", bytes, kUnits[unit]);
}

// Replaces control characters and line ends, because a terminal would act on them.
std::string Printable(const std::string& text) {
  std::string out;
  for (const char c : text) {
    const bool control = static_cast<unsigned char>(c) < 0x20 || c == 0x7f;
    out += control ? ' ' : c;
  }
  return out;
}

}  // namespace

void StatusBoard::Attach(const std::string& host, int port, std::function<ps::JobView()> view) {
  ps::MutexLock lock(&mu_);
  address_ = ps::JoinHostPort(host, port);
  view_ = std::move(view);
}

void StatusBoard::Detach() {
  ps::MutexLock lock(&mu_);
  if (view_) last_view_ = view_();
  view_ = nullptr;
}

void StatusBoard::NoteProblem(Problem problem) {
  problems_.push_front(std::move(problem));
  if (problems_.size() > kProblems) problems_.pop_back();
}

void StatusBoard::OnReport(int node_id, const std::string& report) {
  StatusRecord record;
  const bool readable = StatusRecord::Parse(report, &record);
  const bool worker = IsWorker(node_id);
  const std::string who = (worker ? "worker " : "server ") + std::to_string(RankOf(node_id));
  ps::MutexLock lock(&mu_);
  Entry& entry = entries_[node_id];
  if (!readable || (record.role == Role::kWorker) != worker) {
    if (!entry.unreadable) {
      NoteProblem({UnixMs(), who, "sends a status that this scheduler cannot read"});
    }
    entry.unreadable = true;
    return;
  }
  const StatusRecord& before = entry.record;
  // Another process may have taken the node's rank.
  const bool same = entry.records > 0 && before.pid == record.pid && before.host == record.host &&
                    record.clock_ns > before.clock_ns;
  const double seconds = same ? static_cast<double>(record.clock_ns - before.clock_ns) * 1e-9 : 1;
  const auto rate = [same, seconds](uint64_t then, uint64_t now) {
    return same && now >= then ? static_cast<double>(now - then) / seconds : 0.0;
  };
  entry.sent_per_s = rate(before.sent_bytes, record.sent_bytes);
  entry.received_per_s = rate(before.received_bytes, record.received_bytes);
  entry.finished_per_s = rate(before.finished, record.finished);
  entry.busy = rate(before.busy_ns, record.busy_ns) * 1e-9;
  entry.nics.clear();
  for (const ps::NicReading& now : record.nics) {
    // A NIC without earlier traffic has no earlier reading: the counters then start at zero.
    ps::NicReading then;
    for (const ps::NicReading& earlier : before.nics) {
      if (earlier.nic == now.nic) then = earlier;
    }
    entry.nics.push_back(
        {rate(then.bytes_sent, now.bytes_sent), rate(then.bytes_received, now.bytes_received)});
  }
  if (record.problems > (same ? before.problems : 0)) {
    NoteProblem({record.problem_unix_ms, who, record.problem});
  }
  entry.record = std::move(record);
  entry.came = Clock::now();
  ++entry.records;
}

void StatusBoard::OnGeneration() {
  ps::MutexLock lock(&mu_);
  entries_.clear();
}

int StatusBoard::Snapshot::Count(const char* role, bool left) const {
  return static_cast<int>(std::count_if(rows.begin(), rows.end(), [role, left](const Row& row) {
    return row.role == role && row.peer.left == left;
  }));
}

StatusBoard::Slowest StatusBoard::FindSlowest(const std::vector<Row>& rows) {
  std::map<uint32_t, LateWorker> late;
  uint64_t sums = 0;
  for (const Row& row : rows) {
    sums += row.entry.record.sums_since;
    for (const LateWorker& worker : row.entry.record.late) {
      LateWorker& all = late[worker.rank];
      all.rank = worker.rank;
      all.sums += worker.sums;
      all.wait_ns += worker.wait_ns;
    }
  }
  Slowest slowest;
  uint64_t longest = 0;
  for (const auto& item : late) {
    const LateWorker& worker = item.second;
    if (worker.wait_ns <= longest || sums == 0) continue;
    longest = worker.wait_ns;
    slowest.rank = static_cast<int>(worker.rank);
    slowest.last_in = static_cast<double>(worker.sums) / static_cast<double>(sums);
    slowest.mean_wait_s =
        static_cast<double>(worker.wait_ns) * 1e-9 / static_cast<double>(worker.sums);
  }
  return slowest;
}

StatusBoard::Snapshot StatusBoard::Look() {
  ps::MutexLock lock(&mu_);
  const ps::LoggedProblem own = ps::LastLoggedProblem();
  if (own.count > own_problems_) {
    own_problems_ = own.count;
    NoteProblem({own.unix_ms, "scheduler", own.text});
  }
  Snapshot shot;
  shot.address = address_;
  shot.view = view_ ? view_() : last_view_;
  shot.problems.assign(problems_.begin(), problems_.end());
  shot.uptime_s = static_cast<uint64_t>(
      std::chrono::duration_cast<std::chrono::seconds>(Clock::now() - begin_).count());
  for (const auto& peer : shot.view.peers) {
    Row row;
    row.peer = peer;
    row.role = NameOf(peer.node.role);
    row.rank = RankOf(peer.node.id);
    const auto entry = entries_.find(peer.node.id);
    if (entry != entries_.end()) row.entry = entry->second;
    shot.rows.push_back(std::move(row));
  }
  std::sort(shot.rows.begin(), shot.rows.end(), [](const Row& a, const Row& b) {
    return a.role != b.role ? a.role < b.role : a.rank < b.rank;
  });
  shot.slowest = FindSlowest(shot.rows);
  return shot;
}

namespace {

const char* StateOf(const ps::JobView::Peer& peer, double patience_s) {
  if (peer.left) return "left";
  return peer.silent_s > patience_s ? "silent" : "active";
}

std::string JsonOf(const ps::ReplicaView& replicas) {
  if (replicas.count() == 0) return "null";
  return JsonObject()
      .Number("epoch", replicas.epoch)
      .Text("present", replicas.present)
      .Text("waiting", replicas.waiting)
      .Done();
}

// Returns text such as "replicas: 0 present, 1 away (epoch 5)".
std::string TextOf(const ps::ReplicaView& replicas) {
  std::string text;
  for (int i = 0; i < replicas.count(); ++i) {
    text += (i > 0 ? ", " : "replicas: ") + std::to_string(i) +
            (replicas.IsPresent(i)        ? " present"
             : replicas.waiting[i] == '1' ? " waits to join"
                                          : " away");
  }
  return text.empty() ? "" : text + Format(" (epoch %d)\n", replicas.epoch);
}

}  // namespace

std::string StatusBoard::NicsJson(const Entry& entry) {
  size_t index = 0;
  return JsonList(entry.record.nics, [&](const ps::NicReading& nic) {
    const NicRates& rates = entry.nics[index++];
    return JsonObject()
        .Text("nic", nic.nic)
        .Number("received_bytes", nic.bytes_received)
        .Real("received_bytes_per_s", rates.received)
        .Number("sent_bytes", nic.bytes_sent)
        .Real("sent_bytes_per_s", rates.sent)
        .Done();
  });
}

std::string StatusBoard::NicsText(const std::vector<Row>& rows) {
  std::string out;
  size_t lines = 0;
  for (const Row& row : rows) {
    if (row.peer.node.nics < 2) continue;
    for (size_t i = 0; i < row.entry.record.nics.size() && lines < kTextRows; ++i, ++lines) {
      const ps::NicReading& nic = row.entry.record.nics[i];
      const NicRates& rates = row.entry.nics[i];
      out += Format("%-12s %-15s %9s/s %9s %9s/s %9s\n",
                    (row.role + " " + std::to_string(row.rank)).c_str(), Printable(nic.nic).c_str(),
                    Bytes(rates.received).c_str(),
                    Bytes(static_cast<double>(nic.bytes_received)).c_str(),
                    Bytes(rates.sent).c_str(), Bytes(static_cast<double>(nic.bytes_sent)).c_str());
    }
  }
  if (out.empty()) return "";
  return Format("\n%-12s %-15s %11s %9s %11s %9s\n", "node", "NIC", "in/s", "in", "out/s", "out") +
         out;
}

std::string StatusBoard::Json() {
  const Snapshot shot = Look();
  const auto counts = [&shot](const char* role, int expected) {
    const int here = shot.Count(role, false), left = shot.Count(role, true);
    return JsonObject()
        .Signed("expected", expected)
        .Signed("active", here)
        .Signed("left", left)
        .Done();
  };
  const auto node = [this](const Row& row) {
    const Entry& entry = row.entry;
    const StatusRecord& record = entry.record;
    JsonObject out;
    out.Text("role", row.role)
        .Signed("rank", row.rank)
        .Text("address", row.peer.node.address)
        .Number("nics", row.peer.node.nics)
        .Raw("by_nic", NicsJson(entry))
        .Text("host", record.host)
        .Number("pid", record.pid)
        .Text("state", StateOf(row.peer, patience_s_))
        .Real("silent_s", row.peer.silent_s)
        .Number("reports", entry.records)
        .Number("received_bytes", record.received_bytes)
        .Real("received_bytes_per_s", entry.received_per_s)
        .Number("sent_bytes", record.sent_bytes)
        .Real("sent_bytes_per_s", entry.sent_per_s)
        .Number("tensors", record.tensors)
        .Number("finished", record.finished)
        .Real("finished_per_s", entry.finished_per_s)
        .Number("failed", record.failed)
        .Number("running", record.running)
        .Number("queued", record.queued)
        .Number("problems", record.problems);
    if (row.role == "server") out.Number("keys", record.keys).Real("adding_cores", entry.busy);
    return out.Done();
  };
  const auto problem = [](const Problem& p) {
    return JsonObject()
        .Text("time", TimeText(p.unix_ms))
        .Text("node", p.who)
        .Text("text", p.text)
        .Done();
  };
  const Slowest& slow = shot.slowest;
  return JsonObject()
             .Number("schema", 1)
             .Text("version", version_)
             .Text("scheduler", shot.address)
             .Text("time", TimeText(UnixMs()))
             .Number("uptime_s", shot.uptime_s)
             .Text("state", NameOf(shot.view.phase))
             .Number("generation", shot.view.generation)
             .Text("reason", shot.view.failure)
             .Raw("workers", counts("worker", shot.view.workers))
             .Raw("servers", counts("server", shot.view.servers))
             .Raw("replicas", JsonOf(shot.view.replicas))
             .Raw("slowest_worker", slow.rank < 0 ? "null"
                                                  : JsonObject()
                                                        .Signed("rank", slow.rank)
                                                        .Real("last_in", slow.last_in)
                                                        .Real("mean_wait_s", slow.mean_wait_s)
                                                        .Done())
             .Raw("nodes", JsonList(shot.rows, node))
             .Raw("errors", JsonList(shot.problems, problem))
             .Done() +
         "\n";
}

std::string StatusBoard::Text() {
  const Snapshot shot = Look();
  const auto expected = [](int count) { return count < 0 ? "?" : std::to_string(count); };
  const int workers = shot.Count("worker", false) + shot.Count("worker", true);
  const int servers = shot.Count("server", false);
  std::string out = Format(
      "job %s%s at %s: %d of %s workers, %d of %s servers, up %llu s, byteps %s\n",
      NameOf(shot.view.phase),
      shot.view.generation > 1 ? Format(", generation %d,", shot.view.generation).c_str() : "",
      shot.address.c_str(), workers, expected(shot.view.workers).c_str(), servers,
      expected(shot.view.servers).c_str(), static_cast<unsigned long long>(shot.uptime_s),
      version_.c_str());
  if (!shot.view.failure.empty()) out += "reason: " + Printable(shot.view.failure) + "\n";
  out += TextOf(shot.view.replicas);
  out +=
      Format("\n%-12s %-24s %-16s %-7s %6s %11s %9s %11s %9s %8s %7s %7s\n", "node", "address",
             "host", "state", "heard", "in/s", "in", "out/s", "out", "sums/s", "tensors", "keys");
  size_t rows = 0;
  for (const Row& row : shot.rows) {
    if (++rows > kTextRows) {
      out += Format("... and %zu more\n", shot.rows.size() - rows + 1);
      break;
    }
    const Entry& e = row.entry;
    const std::string name = row.role + " " + std::to_string(row.rank);
    out += Format(
        "%-12s %-24s %-16.16s %-7s %5.0fs %9s/s %9s %9s/s %9s %8.1f %7llu %7s\n", name.c_str(),
        row.peer.node.address.c_str(), Printable(e.records > 0 ? e.record.host : "-").c_str(),
        StateOf(row.peer, patience_s_), row.peer.silent_s, Bytes(e.received_per_s).c_str(),
        Bytes(static_cast<double>(e.record.received_bytes)).c_str(), Bytes(e.sent_per_s).c_str(),
        Bytes(static_cast<double>(e.record.sent_bytes)).c_str(), e.finished_per_s,
        static_cast<unsigned long long>(e.record.tensors),
        row.role == "server" ? std::to_string(e.record.keys).c_str() : "-");
  }
  out += NicsText(shot.rows);
  const Slowest& slow = shot.slowest;
  if (slow.rank >= 0) {
    out += Format(
        "\nslowest worker: %d, the last to push in %.0f %% of sums, %.1f ms after the first\n",
        slow.rank, slow.last_in * 100, slow.mean_wait_s * 1000);
  }
  if (!shot.problems.empty()) out += "\nlast errors\n";
  for (const Problem& p : shot.problems) {
    out += "  " + TimeText(p.unix_ms) + " " + p.who + ": " + Printable(p.text) + "\n";
  }
  return out;
}

}  // namespace core
}  // namespace byteps
