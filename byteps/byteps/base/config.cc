#include "byteps/base/config.h"

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <stdexcept>

#include "byteps/base/error.h"

extern char** environ;

namespace byteps {
namespace core {
namespace {

constexpr double kMaxInt = 2147483647;

std::vector<Variable> MakeTable() {
  using V = Variable;
  const auto kInt = V::kInt;
  const auto kFloat = V::kFloat;
  const auto kBool = V::kBool;
  const auto kString = V::kString;
  const auto kChoice = V::kChoice;
  return {
      {"DMLC_ROLE", kChoice, "", "worker", 0, 0, "worker|server|scheduler",
       "What this process is. `byteps-server` takes it when --role is not given; Python processes "
       "are workers."},
      {"DMLC_PS_ROOT_URI", kString, "", "", 0, 0, "",
       "Host name or address of the scheduler. A worker without it starts its own scheduler and "
       "servers (embedded mode)."},
      {"DMLC_PS_ROOT_PORT", kInt, "port", "0", 0, 65535, "",
       "Port of the scheduler. On the scheduler itself 0 lets the kernel choose; see --port-file."},
      {"DMLC_NUM_WORKER", kInt, "workers", "1", 1, kMaxInt, "",
       "Workers in the job. Workers take WORLD_SIZE when the launcher sets it."},
      {"DMLC_NUM_SERVER", kInt, "servers", "1", 1, 65536, "", "Servers in the job."},
      {"DMLC_WORKER_ID", kInt, "", "0", 0, kMaxInt, "",
       "Rank of this worker. RANK is taken when the launcher sets it."},
      {"DMLC_NODE_HOST", kString, "", "", 0, 0, "",
       "Address at which the others reach this process. Default: that of DMLC_INTERFACE."},
      {"DMLC_INTERFACE", kString, "", "", 0, 0, "",
       "Network interface whose address the others reach. Default: the one that leads to the "
       "scheduler."},
      {"DMLC_USE_KUBERNETES", kBool, "", "0", 0, 1, "",
       "The scheduler listens on every address, for when DMLC_PS_ROOT_URI is the address of a "
       "service in front of it."},
      {"DMLC_ENABLE_RDMA", kChoice, "", "tcp", 0, 0, "tcp|0|ibverbs|1",
       "Transport, the same on all nodes: tcp (or 0), or ibverbs (or 1), which is RDMA: InfiniBand "
       "or RoCE."},
      {"RANK", kInt, "", "0", 0, kMaxInt, "", "Rank of this worker, set by torchrun."},
      {"WORLD_SIZE", kInt, "workers", "1", 1, kMaxInt, "", "Workers in the job, set by torchrun."},
      {"LOCAL_RANK", kInt, "", "0", 0, kMaxInt, "",
       "Rank of this worker on its host, set by torchrun."},
      {"LOCAL_WORLD_SIZE", kInt, "workers", "1", 1, kMaxInt, "",
       "Workers on this host, set by torchrun."},
      {"BYTEPS_LOCAL_RANK", kInt, "", "0", 0, kMaxInt, "",
       "As LOCAL_RANK, for launchers other than torchrun."},
      {"BYTEPS_LOCAL_SIZE", kInt, "workers", "1", 1, kMaxInt, "",
       "As LOCAL_WORLD_SIZE, for launchers other than torchrun."},
      {"BYTEPS_EMBEDDED_SERVERS", kInt, "servers", "1", 1, 256, "",
       "Embedded mode: servers started on each host. A job on several hosts has to set it."},
      {"BYTEPS_HOST_ID", kString, "", "", 0, 0, "",
       "Name of this host. Workers with the same name are taken to share a network card and to "
       "reach each other without it. Default: the host's name and the kernel's boot id."},
      {"BYTEPS_CHECK_GRADIENTS", kBool, "", "0", 0, 1, "",
       "With --dpu-optimizer and --overlap-grad-reduce: send copies of the gradients that are sent "
       "while the backward pass runs, and fail in the step if anything has changed one since. For "
       "debugging; takes the copies' memory."},
      {"BYTEPS_NODE_PIECE_BYTES", kInt, "bytes", "1048576", 1, 1073741824, "",
       "Where the ranks of a host sum first, a tensor is cut into at most 8 pieces, of which each "
       "rank pushes at least this much. The same on all workers."},
      {"BYTEPS_LINK_GBPS", kFloat, "Gbit/s", "0", 0, 1e6, "",
       "Rate of the network card of a worker's host, each way: for the cost model, for partitions, "
       "which are longer on fast links, and for BYTEPS_TCP_CONNECTIONS. 0: what the card with the "
       "worker's address says, if it is a real one. All workers use the slowest one's rate, or "
       "none where one of them is not known."},
      {"BYTEPS_SERVER_LINK_GBPS", kFloat, "Gbit/s", "0", 0, 1e6, "",
       "Rate of a server's network card, each way, for the cost model. 0: as BYTEPS_LINK_GBPS."},
      {"BYTEPS_MEASURE_LINKS", kBool, "", "1", 0, 1, "",
       "Before training begins, ranks on several hosts sum a scratch tensor of at most 64 MiB "
       "through servers and by the collective, in turn, so that gradients go the faster way. 0 on "
       "any worker, or BYTEPS_LINK_GBPS: none measures, and the rates of the cards decide."},
      {"BYTEPS_LOCAL_SERVERS", kInt, "servers", "0", 0, 256, "",
       "Servers on each worker's host, which share its network card, for the cost model; the "
       "others are on machines of their own. In embedded mode all servers are local. The same on "
       "all workers."},
      {"BYTEPS_SERVERS_PER_MACHINE", kInt, "servers", "1", 1, 256, "",
       "Servers on each machine of their own, for the cost model. Bytes are dealt to servers in "
       "equal parts: more of them on one kind of machine are its weight. The same on all workers."},
      {"BYTEPS_PARTITION_BYTES", kInt, "bytes", "4096000", 1, 1073741824, "",
       "Tensors are cut into partitions of at most this many bytes, rounded up to whole pages. The "
       "same on all workers."},
      {"BYTEPS_MIN_PARTITION_BYTES", kInt, "bytes", "131072", 1, 1073741824, "",
       "A tensor is cut into 64 partitions a server, so that sums flow back early, or fewer where "
       "links are known to be fast (BYTEPS_LINK_GBPS), but none smaller than this (and the last), "
       "rounded up to whole pages, or than BYTEPS_PARTITION_BYTES if that is less. The same on all "
       "workers."},
      {"BYTEPS_PUSH_THREAD", kInt, "threads", "4", 1, 64, "",
       "Push loops of a worker, which take partitions by priority, enqueue copies from the GPU and "
       "send, and as many pull loops, which copy sums that did not arrive in their place, and "
       "enqueue copies to the GPU."},
      {"BYTEPS_SERVER_WINDOW_BYTES", kInt, "bytes", "0", 0, 1e12, "",
       "Partitions that a worker may have on their way to each server; the others wait where one "
       "of higher priority overtakes them. 0: twice the partition, and no less than the server's "
       "share of what all servers together take in 5 ms. That counts as 16 MiB at most, and over "
       "RDMA always as 16 MiB."},
      {"BYTEPS_PINNED_BYTES", kInt, "bytes", "268435456", 1, 1e15, "",
       "Pinned host memory of a worker whose tensors are on a GPU: partitions pass through it. As "
       "much as the declared tensors need, at most this much, at least one partition of "
       "BYTEPS_PARTITION_BYTES."},
      {"BYTEPS_KEY_HASH_FN", kChoice, "", "raw", 0, 0, "raw|djb2",
       "How partitions are dealt to servers. raw: round robin from the tensor's placement. The "
       "same on all workers."},
      {"BYTEPS_SERVER_ENGINE_THREAD", kInt, "threads", "4", 1, 256, "",
       "Threads of a server that add. A partition stays with one of them."},
      {"BYTEPS_DETERMINISTIC", kBool, "", "0", 0, 1, "",
       "Servers add in the order of ranks, not of arrival: runs agree bit for bit, for some "
       "waiting and memory."},
      {"BYTEPS_SERVER_WIDE_FLOAT32", kBool, "", "1", 0, 1, "",
       "Servers add more than two fp32 values in fp64 and round once, so that no sum is worse than "
       "an all-reduce's. 0: in fp32, with half the memory for a sum under way."},
      {"BYTEPS_SERVER_STATE_BYTES", kInt, "bytes", "0", 0, 1e15, "",
       "Memory that a server may keep optimizer state in: 12 bytes a parameter for AdamW, and 2 or "
       "4 where "
       "steps are tried before it is known whether they are clipped. More is "
       "refused when it is declared. 0: what is free on its machine, or in its container, when it "
       "starts; set it where several servers share a machine."},
      {"BYTEPS_PEER_TIMEOUT_S", kFloat, "s", "30", 0.1, 86400, "",
       "A peer that is silent for so long is lost and the job fails. (A closed connection is "
       "noticed at once.)"},
      {"BYTEPS_START_TIMEOUT_S", kFloat, "s", "30", 0.1, 86400, "",
       "The scheduler must answer within this time. Once a worker has registered, all nodes must, "
       "each within this time of the one before."},
      {"BYTEPS_KEEP", kBool, "", "0", 0, 1, "",
       "Scheduler and servers: as `byteps-server --keep`. They outlive a failure of the job and "
       "take "
       "its next incarnation, with as many workers as then come; DMLC_NUM_WORKER is not looked "
       "at."},
      {"BYTEPS_KEEP_TIMEOUT_S", kFloat, "s", "1800", 0, 604800, "",
       "A scheduler with --keep ends when no worker comes for so long after a failure. 0: it waits "
       "without end."},
      {"BYTEPS_RECONNECT_TIMEOUT_S", kFloat, "s", "30", 0, 86400, "",
       "A connection that breaks is made again, over TCP as over RDMA, and what was under way is "
       "sent again. After so long without success the peer is lost and the job fails. 0: at once."},
      {"BYTEPS_OP_TIMEOUT_S", kFloat, "s", "600", 0.1, 604800, "",
       "A push_pull that is not complete by then fails, naming the ranks that did not push."},
      {"BYTEPS_AUTH", kBool, "", "1", 0, 1, "",
       "Nodes prove to each other that they have the job's secret. 0: whoever reaches a node's "
       "port "
       "may speak to it. The same on all nodes."},
      {"BYTEPS_SECRET_FILE", kString, "", "", 0, 0, "",
       "File with the job's secret, the same on all nodes; `byteps-server --new-secret FILE` makes "
       "one."},
      {"BYTEPS_SECRET", kString, "", "", 0, 0, "",
       "The job's secret itself, at least 16 bytes, instead of a file. Never printed."},
      {"BYTEPS_TLS", kBool, "", "0", 0, 1, "",
       "Encrypt all TCP connections between nodes with TLS 1.3, by OpenSSL 3 of the machine. Who "
       "may "
       "speak is decided by the job's secret, or by certificates where BYTEPS_TLS_CERT is set. The "
       "same on all nodes. Not with RDMA."},
      {"BYTEPS_TLS_CERT", kString, "", "", 0, 0, "",
       "This node's certificate, as a PEM file, with those that it was signed by up to "
       "BYTEPS_TLS_CA. Goes with BYTEPS_TLS_KEY and BYTEPS_TLS_CA; on all nodes or on none."},
      {"BYTEPS_TLS_KEY", kString, "", "", 0, 0, "",
       "The private key of BYTEPS_TLS_CERT, as a PEM file without a password."},
      {"BYTEPS_TLS_CA", kString, "", "", 0, 0, "",
       "Certificates of the authorities that sign those of nodes, as a PEM file. With "
       "BYTEPS_AUTH=0 "
       "whoever has a certificate of theirs is of the job."},
      {"BYTEPS_NODE_PORT", kInt, "port", "0", 0, 65535, "",
       "Port at which a server listens, the only one that a firewall has to let workers reach. 0: "
       "the kernel chooses. Workers listen nowhere."},
      {"BYTEPS_IO_THREADS", kInt, "threads", "0", 0, 64, "",
       "Threads of each process that move bytes over TCP. 0: a quarter of the processors that each "
       "worker of the host has, at most 8."},
      {"BYTEPS_TCP_CONNECTIONS", kInt, "connections", "0", 0, 64, "",
       "TCP connections between a worker and each server. 0: one for each 10 Gbit/s that the "
       "worker exchanges with the server where the network card is the limit (BYTEPS_LINK_GBPS; 40 "
       "where its rate is not known, 100 inside a host), at most BYTEPS_IO_THREADS."},
      {"BYTEPS_RECEIVE_POOL_BYTES", kInt, "bytes", "1073741824", 0, 1e15, "",
       "Memory for values received over TCP that a process keeps for reuse while nobody uses it."},
      {"BYTEPS_RDMA_DEVICE", kString, "", "", 0, 0, "",
       "RDMA device, such as mlx5_0. Default: that of DMLC_NODE_HOST or DMLC_INTERFACE, else of "
       "the address that leads to the scheduler."},
      {"BYTEPS_RDMA_PORT", kInt, "", "0", 0, 255, "",
       "Port of the RDMA device. 0: that of the address."},
      {"BYTEPS_RDMA_GID_INDEX", kInt, "", "-1", -1, 255, "",
       "GID of the RDMA port, which on RoCE also says the version. -1: that of the address."},
      {"BYTEPS_RDMA_TRAFFIC_CLASS", kInt, "", "-1", -1, 255, "",
       "Traffic class of RDMA packets, on RoCE DSCP times 4. -1: the system's."},
      {"BYTEPS_RDMA_MTU", kChoice, "bytes", "0", 0, 0, "0|256|512|1024|2048|4096",
       "Greatest packet of an RDMA connection; the lesser of both nodes' holds. 0: the path's."},
      {"BYTEPS_RDMA_START_DEPTH", kInt, "requests", "64", 4, 65535, "",
       "Sends under way on each RDMA endpoint."},
      {"BYTEPS_RDMA_RX_DEPTH", kInt, "slots", "128", 8, 65535, "",
       "Receives that each RDMA endpoint has posted. It takes (this + BYTEPS_RDMA_START_DEPTH) * "
       "(1024 + BYTEPS_RDMA_INLINE_BYTES) bytes of locked memory."},
      {"BYTEPS_RDMA_INLINE_BYTES", kInt, "bytes", "4096", 0, 1048576, "",
       "Values of at most this many bytes are sent with their message into a slot, larger ones "
       "are written into memory that the receiver offers. The same on all nodes."},
      {"BYTEPS_RDMA_POOL_BYTES", kInt, "bytes", "1073741824", 0, 1e15, "",
       "Registered memory for received values that a process keeps for reuse while nobody uses "
       "it."},
      {"BYTEPS_RDMA_WINDOW_BYTES", kInt, "bytes", "1048576", 16384, 1e9, "",
       "Values that a data endpoint has handed to the device and that have not arrived yet, at "
       "most: enough to keep the link busy, and no more, since what lets the peer send waits "
       "behind them."},
      {"BYTEPS_RDMA_RECEIVE_WINDOW_BYTES", kInt, "bytes", "16777216", 0, 1e15, "",
       "Values that each RDMA endpoint lets its peer have on their way to it, at most, or one if "
       "that is larger; others wait. It bounds the memory that a server needs for each worker."},
      {"BYTEPS_RDMA_BUSY_POLL", kBool, "", "0", 0, 1, "",
       "Threads that handle RDMA completions never sleep: less delay for two busy cores."},
      {"BYTEPS_RDMA_DATA_PLANE", kBool, "", "1", 0, 1, "",
       "Pushes and pulls have RDMA connections of their own. 0: they share the control plane's."},
      {"BYTEPS_RDMA_DATA_ENDPOINTS", kInt, "endpoints", "1", 1, 64, "",
       "RDMA data connections between a worker and a server, for links that one does not fill."},
      {"BYTEPS_METRICS_PORT", kInt, "port", "0", 0, 65535, "",
       "Serve metrics to Prometheus at this port plus the local rank: LOCAL_RANK of a worker, "
       "BYTEPS_LOCAL_RANK of a server. 0: do not."},
      {"BYTEPS_METRICS_HOST", kString, "", "", 0, 0, "",
       "Address of this host at which metrics are served, to everybody. Default: the one at which "
       "the "
       "other nodes reach this process, and 127.0.0.1. 0.0.0.0: all of them."},
      {"BYTEPS_STATUS_PORT", kInt, "port", "0", 0, 65535, "",
       "The scheduler shows who is in the job, and what each does, at this port: a page, and the "
       "same as JSON at /status. 0: it does not."},
      {"BYTEPS_STATUS_HOST", kString, "", "127.0.0.1", 0, 0, "",
       "Address of the scheduler's host at which it shows that, without asking who reads. 0.0.0.0: "
       "all of them."},
      {"BYTEPS_STOP_TIMEOUT_S", kFloat, "s", "10", 0, 3600, "",
       "For how long a server that is told to end (SIGTERM) waits for the sums under way, before "
       "it ends the job."},
      {"BYTEPS_HEALTH_SOCKET", kString, "", "", 0, 0, "",
       "Path of a Unix socket at which a scheduler or server says how it is: `byteps-server "
       "--health` "
       "asks there. Default: none."},
      {"BYTEPS_TRACE_ON", kBool, "", "0", 0, 1, "",
       "Record what happens to each partition, and write it for Perfetto when the job ends."},
      {"BYTEPS_TRACE_START_STEP", kInt, "", "0", 0, kMaxInt, "",
       "First round of each tensor that is recorded, counted from 0."},
      {"BYTEPS_TRACE_END_STEP", kInt, "", "2147483647", 0, kMaxInt, "",
       "Last round of each tensor that is recorded."},
      {"BYTEPS_TRACE_DIR", kString, "", ".", 0, 0, "",
       "Folder for the timelines, byteps-worker-0.json and so on. It is made if need be."},
      {"BYTEPS_TRACE_LIMIT", kInt, "partitions", "100000", 1, 100000000, "",
       "Partitions that a process records at most, the first ones; 100000 take about 60 MB."},
      {"BYTEPS_LOG_LEVEL", kChoice, "", "WARNING", 0, 0, "TRACE|DEBUG|INFO|WARNING|ERROR|FATAL",
       "Least severity that is logged. Default: INFO for the scheduler and servers, WARNING for "
       "workers."},
      {"BYTEPS_LOG_FORMAT", kChoice, "", "text", 0, 0, "text|json",
       "Form of the log's lines, each with time, severity, role, rank and host. json: one object a "
       "line."},
      {"BYTEPS_LOG_HIDE_TIME", kBool, "", "0", 0, 1, "", "Log without date and time."},
      {"PS_VERBOSE", kInt, "", "0", 0, 3, "",
       "Log ps-lite's control messages (1) and all messages (2)."},
  };
}

const Variable* Find(const std::string& name) {
  for (const auto& v : Config::Table()) {
    if (name == v.name) return &v;
  }
  return nullptr;
}

std::string Number(double x) {
  std::ostringstream text;
  text.precision(17);
  text << x;
  return text.str();
}

std::vector<std::string> Split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  std::istringstream in(text);
  for (std::string part; std::getline(in, part, separator);) parts.push_back(part);
  return parts;
}

std::string Join(const std::vector<std::string>& parts, const std::string& separator) {
  std::string text;
  for (const auto& part : parts) text += (text.empty() ? "" : separator) + part;
  return text;
}

std::string Allowed(const Variable& v) {
  switch (v.type) {
    case Variable::kInt:
      return "an integer from " + Number(v.low) + " to " + Number(v.high);
    case Variable::kFloat:
      return "a number from " + Number(v.low) + " to " + Number(v.high);
    case Variable::kBool:
      return "0 or 1";
    case Variable::kChoice:
      return "one of " + Join(Split(v.choices, '|'), ", ");
    case Variable::kString:
      return "text";
  }
  return "";
}

bool IsAllowed(const Variable& v, const std::string& value) {
  const char* begin = value.c_str();
  char* end = nullptr;
  errno = 0;
  switch (v.type) {
    case Variable::kInt: {
      if (value.empty() || isspace(static_cast<unsigned char>(value[0]))) return false;
      const long x = strtol(begin, &end, 10);
      return *end == '\0' && errno == 0 && x >= v.low && x <= v.high;
    }
    case Variable::kFloat: {
      if (value.empty() || isspace(static_cast<unsigned char>(value[0]))) return false;
      const double x = strtod(begin, &end);
      return *end == '\0' && errno == 0 && std::isfinite(x) && x >= v.low && x <= v.high;
    }
    case Variable::kBool:
      return value == "0" || value == "1";
    case Variable::kChoice: {
      const auto choices = Split(v.choices, '|');
      return std::find(choices.begin(), choices.end(), value) != choices.end();
    }
    case Variable::kString:
      return true;
  }
  return false;
}

// Letters to insert, delete or replace to turn one name into the other.
size_t EditDistance(const std::string& a, const std::string& b) {
  std::vector<size_t> row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t replaced = diagonal + (a[i - 1] != b[j - 1]);
      diagonal = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, replaced});
    }
  }
  return row[b.size()];
}

// Upstream's, which would corrupt a training here: workers push the differences of their
// parameters, and our servers answer the sum of one round, not the parameters so far.
void RefuseAsync() {
  const char* text = getenv("BYTEPS_ENABLE_ASYNC");
  if (text == nullptr || *text == '\0' || strcmp(text, "0") == 0) return;
  throw UsageError(std::string("BYTEPS_ENABLE_ASYNC='") + text +
                   "' is not allowed: asynchronous training is not supported here; unset it");
}

}  // namespace

const std::vector<Variable>& Config::Table() {
  static const auto* table = new std::vector<Variable>(MakeTable());
  return *table;
}

Config Config::FromEnvironment() {
  RefuseAsync();
  Config config;
  for (const auto& v : Table()) {
    const char* text = getenv(v.name);
    config.set_[v.name] = text != nullptr;
    const std::string value = text != nullptr ? text : v.fallback;
    if (text != nullptr && !IsAllowed(v, value)) {
      throw UsageError(std::string(v.name) + "='" + value + "' is not allowed: it must be " +
                       Allowed(v) + (v.unit[0] ? std::string(" (") + v.unit + ")" : ""));
    }
    config.values_[v.name] = value;
  }
  return config;
}

const std::string& Config::Value(const std::string& name, Variable::Type type) const {
  const Variable* v = Find(name);
  if (v == nullptr || v->type != type) throw std::logic_error("no such setting: " + name);
  return values_.at(name);
}

long Config::Int(const std::string& name) const { return std::stol(Value(name, Variable::kInt)); }
double Config::Float(const std::string& name) const {
  return std::stod(Value(name, Variable::kFloat));
}
bool Config::Bool(const std::string& name) const { return Value(name, Variable::kBool) == "1"; }

const std::string& Config::String(const std::string& name) const {
  const Variable* v = Find(name);
  const bool choice = v != nullptr && v->type == Variable::kChoice;
  return Value(name, choice ? Variable::kChoice : Variable::kString);
}

bool Config::IsSet(const std::string& name) const { return set_.at(name); }

std::string Config::Print() const {
  std::ostringstream out;
  for (const auto& v : Table()) {
    const bool hidden = v.name == std::string("BYTEPS_SECRET") && !values_.at(v.name).empty();
    out << v.name << "=" << (hidden ? "(hidden)" : values_.at(v.name))
        << (set_.at(v.name) ? "" : "  # default") << "\n";
  }
  return out.str();
}

std::vector<std::string> Config::UnknownVariables() {
  std::vector<std::string> warnings;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const char* equals = strchr(*entry, '=');
    if (equals == nullptr) continue;
    const std::string name(*entry, equals - *entry);
    const bool ours = name.rfind("BYTEPS_", 0) == 0 || name.rfind("DMLC_", 0) == 0;
    if (!ours || Find(name) != nullptr || name == "BYTEPS_ENABLE_ASYNC") continue;
    const Variable* nearest = nullptr;
    size_t least = name.size();
    for (const auto& v : Table()) {
      const size_t distance = EditDistance(name, v.name);
      if (distance < least) {
        least = distance;
        nearest = &v;
      }
    }
    warnings.push_back(
        "unknown variable " + name + " is ignored" +
        (nearest != nullptr ? std::string("; did you mean ") + nearest->name + "?" : ""));
  }
  std::sort(warnings.begin(), warnings.end());
  return warnings;
}

std::string Config::Markdown() {
  static const char* const kTypes[] = {"integer", "number", "0 or 1", "text", "choice"};
  std::ostringstream out;
  out << "# Configuration\n\n"
         "Made by `byteps-server --config-markdown`; edit the table in "
         "`byteps/byteps/base/config.cc`.\n\n"
         "Every setting is an environment variable. Each process reads them once, when it starts, "
         "whole: a\n"
         "value that is not allowed is an error that names the variable, and an unknown `BYTEPS_*` "
         "or `DMLC_*`\n"
         "gets a warning with the nearest known name. `byteps-server --print-config` and "
         "`bps.print_config()`\n"
         "print what is in force.\n\n"
         "| variable | type | unit | default | allowed | meaning |\n|---|---|---|---|---|---|\n";
  for (const auto& v : Table()) {
    std::string allowed;
    if (v.type == Variable::kInt || v.type == Variable::kFloat) {
      allowed = Number(v.low) + " to " + Number(v.high);
    } else if (v.type == Variable::kChoice) {
      allowed = "`" + Join(Split(v.choices, '|'), "` `") + "`";
    }
    const std::string fallback = v.fallback[0] ? std::string("`") + v.fallback + "`" : "";
    out << "| `" << v.name << "` | " << kTypes[v.type] << " | " << v.unit << " | " << fallback
        << " | " << allowed << " | " << v.doc << " |\n";
  }
  return out.str();
}

namespace {

// The launcher's variable, else ours, else `fallback`.
int Choose(const Config& config, const char* launcher, const char* ours, int fallback) {
  const bool by_launcher = config.IsSet(launcher);
  const bool by_us = config.IsSet(ours);
  if (by_launcher && by_us && config.Int(launcher) != config.Int(ours)) {
    throw UsageError(std::string(launcher) + "=" + std::to_string(config.Int(launcher)) + " and " +
                     ours + "=" + std::to_string(config.Int(ours)) + " disagree; unset " + ours);
  }
  if (by_launcher) return static_cast<int>(config.Int(launcher));
  if (by_us) return static_cast<int>(config.Int(ours));
  return fallback;
}

}  // namespace

Launch Launch::From(const Config& config) {
  Launch launch;
  launch.rank = Choose(config, "RANK", "DMLC_WORKER_ID", 0);
  launch.size = Choose(config, "WORLD_SIZE", "DMLC_NUM_WORKER", 1);
  launch.local_rank = Choose(config, "LOCAL_RANK", "BYTEPS_LOCAL_RANK", 0);
  launch.local_size = Choose(config, "LOCAL_WORLD_SIZE", "BYTEPS_LOCAL_SIZE", 1);
  if (launch.rank >= launch.size) {
    throw UsageError("the rank " + std::to_string(launch.rank) +
                     " (RANK, DMLC_WORKER_ID) is not below the number of workers, " +
                     std::to_string(launch.size) + " (WORLD_SIZE, DMLC_NUM_WORKER)");
  }
  return launch;
}

}  // namespace core
}  // namespace byteps
