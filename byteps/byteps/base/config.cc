#include "byteps/base/config.h"

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>

#include "byteps/base/invariant.h"

extern char** environ;

namespace byteps {
namespace core {
namespace {

const Variable* Find(const std::string& name) {
  for (const auto& v : Config::Table()) {
    if (name == v.name) return &v;
  }
  return nullptr;
}

std::string Number(double x) {
  std::ostringstream text;
  text.precision(16);  // prints 0.1 as 0.1, and 1e15 in full
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

// Returns the edit distance: the number of letters to insert, delete or replace.
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

// Returns a name without its prefix. Most names share the prefix, so it says nothing about
// likeness.
std::string StemOf(const std::string& name) { return name.substr(name.find('_') + 1); }

// Returns the variable that `name` is probably a misspelling of, or null.
const Variable* NearestTo(const std::string& name) {
  const std::string stem = StemOf(name);
  // A typo changes one or two letters, in a long name up to a quarter. Names that differ more are
  // unrelated.
  const size_t limit = std::max<size_t>(stem.size() <= 4 ? 1 : 2, stem.size() / 4);
  const Variable* nearest = nullptr;
  size_t least = limit + 1;
  for (const auto& v : Config::Table()) {
    if (v.audience == Variable::kInternal) continue;
    const size_t distance = EditDistance(stem, StemOf(v.name));
    if (distance < least) {
      least = distance;
      nearest = &v;
    }
  }
  return nearest;
}

// Refuses upstream's asynchronous mode. In that mode workers push differences of parameters, and
// these servers would return the sum of one round's differences, not the accumulated parameters.
void RefuseAsync() {
  const char* text = getenv("BYTEPS_ENABLE_ASYNC");
  if (text == nullptr || *text == '\0' || strcmp(text, "0") == 0) return;
  throw UsageError(std::string("BYTEPS_ENABLE_ASYNC='") + text +
                   "' is not allowed: asynchronous training is not supported here; unset it");
}

void RefuseGone() {
  for (const auto& gone : Config::Gone()) {
    if (getenv(gone.name) == nullptr) continue;
    throw UsageError(std::string(gone.name) + " is gone: " + gone.instead);
  }
}

}  // namespace

Config Config::FromEnvironment(const GivenSettings& given) {
  RefuseAsync();
  RefuseGone();
  for (const auto& [name, value] : given) {
    if (Find(name) == nullptr) throw std::logic_error("no such setting: " + name);
  }
  Config config;
  for (const auto& v : Table()) {
    const auto given_value = given.find(v.name);
    const char* text = given_value != given.end() ? given_value->second.c_str() : getenv(v.name);
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

Variable::Type Config::TypeOf(const std::string& name) {
  const Variable* v = Find(name);
  if (v == nullptr) throw std::logic_error("no such setting: " + name);
  return v->type;
}

bool Config::IsSet(const std::string& name) const { return set_.at(name); }

std::string Config::Print() const {
  std::ostringstream out;
  for (const auto& v : Table()) {
    if (v.audience == Variable::kInternal && !set_.at(v.name)) continue;
    const bool hidden = v.name == std::string("BYTEPS_SECRET") && !values_.at(v.name).empty();
    out << v.name << "=" << (hidden ? "(hidden)" : values_.at(v.name))
        << (set_.at(v.name) ? "" : "  # default") << "\n";
  }
  return out.str();
}

std::string UnknownVariable::Describe() const {
  return "unknown variable " + name + " is ignored" +
         (meant.empty() ? "" : "; did you mean " + meant + "?");
}

std::vector<UnknownVariable> Config::UnknownVariables() {
  std::vector<UnknownVariable> unknown;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const char* equals = strchr(*entry, '=');
    if (equals == nullptr) continue;
    const std::string name(*entry, equals - *entry);
    const bool ours = name.rfind("BYTEPS_", 0) == 0 || name.rfind("DMLC_", 0) == 0;
    if (!ours || Find(name) != nullptr || name == "BYTEPS_ENABLE_ASYNC") continue;
    const Variable* const nearest = NearestTo(name);
    unknown.push_back({name, nearest != nullptr ? nearest->name : ""});
  }
  std::sort(unknown.begin(), unknown.end(),
            [](const auto& a, const auto& b) { return a.name < b.name; });
  return unknown;
}

std::string Config::Markdown() {
  static const char* const kTypes[] = {"integer", "number", "0 or 1", "text", "one of"};
  static const struct {
    const char *title, *first;
  } kGroups[] = {{"Basics", "DMLC_ROLE"},
                 {"Timeouts and restarts", "BYTEPS_PEER_TIMEOUT_S"},
                 {"Tuning", "BYTEPS_LINK_GBPS"},
                 {"PyTorch", "BYTEPS_C10D"},
                 {"RDMA", "BYTEPS_RDMA_DEVICE"},
                 {"Secret and TLS", "BYTEPS_AUTH"},
                 {"Observability", "BYTEPS_METRICS_PORT"}};
  std::ostringstream out;
  out << "# Settings\n\n"
         "Every setting is an environment variable. A process reads it once, when it starts. A\n"
         "value that is not allowed is an error that names the variable. An unknown `BYTEPS_*`\n"
         "or `DMLC_*` gets a warning with the nearest known name, if one is near.\n"
         "`byteps-server --print-config` and `bps.print_config()` print the settings in force.\n"
         "A variable of an earlier version that no longer exists is an error that says what to\n"
         "set.\n\n"
         "A launcher gives a worker its place by `RANK`, `WORLD_SIZE`, `LOCAL_RANK` and\n"
         "`LOCAL_WORLD_SIZE`, as torchrun does, or by `DMLC_WORKER_ID`, `BYTEPS_LOCAL_RANK`\n"
         "and `BYTEPS_LOCAL_SIZE`. The last two take precedence over torchrun's.\n\n"
         "Written by `byteps-server --config-markdown` from the table in "
         "`byteps/byteps/base/config_table.cc`.\n";
  for (const auto& v : Table()) {
    if (v.audience != Variable::kUsers) continue;
    for (const auto& group : kGroups) {
      if (std::string(group.first) == v.name) out << "\n## " << group.title << "\n";
    }
    out << "\n### `" << v.name << "`\n\n" << kTypes[v.type];
    if (v.type == Variable::kInt || v.type == Variable::kFloat) {
      const bool bounded = v.high < kMaxInt;
      out << (bounded ? " from " : " of at least ") << Number(v.low);
      if (bounded) out << " to " << Number(v.high);
    } else if (v.type == Variable::kChoice) {
      out << " `" << Join(Split(v.choices, '|'), "` `") << "`";
    }
    if (v.unit[0]) out << " (" << v.unit << ")";
    if (v.fallback[0]) out << "; default `" << v.fallback << "`";
    out << "\n\n" << v.doc << "\n";
  }
  return out.str();
}

namespace {

// Returns the launcher's variable, else this project's, else `fallback`.
int Choose(const Config& config, const char* launcher, const char* ours, int fallback) {
  const bool by_launcher = config.IsSet(launcher);
  const bool by_us = config.IsSet(ours);
  if (by_launcher && by_us && config.Int(launcher) != config.Int(ours)) {
    throw UsageError(std::string(launcher) + "=" + std::to_string(config.Int(launcher)) + " and " +
                     ours + "=" + std::to_string(config.Int(ours)) +
                     " disagree: workers are the job's ranks, not its hosts; unset " + ours);
  }
  if (by_launcher) return static_cast<int>(config.Int(launcher));
  if (by_us) return static_cast<int>(config.Int(ours));
  return fallback;
}

// Returns this project's variable, else the launcher's.
int Prefer(const Config& config, const char* ours, const char* launcher) {
  return static_cast<int>(config.Int(config.IsSet(ours) ? ours : launcher));
}

// Parses BYTEPS_REPLICA: the replica's number, and the number of replicas.
std::pair<int, int> ReplicaOf(const Config& config) {
  const std::string& text = config.String("BYTEPS_REPLICA");
  if (text.empty()) return {0, 1};
  constexpr int kMost = 4096;
  int number = -1;
  int count = 0;
  char rest = 0;
  if (sscanf(text.c_str(), "%4d/%4d%c", &number, &count, &rest) != 2 || number < 0 ||
      number >= count || count > kMost) {
    throw UsageError("BYTEPS_REPLICA='" + text +
                     "' is not NUMBER/COUNT: 0/4, 1/4, 2/4 and 3/4 are four replicas");
  }
  return {number, count};
}

// WORLD_SIZE counts the workers of one replica. DMLC_NUM_WORKER counts the workers of all replicas;
// it is equal on all nodes.
int WorkersOfReplica(const Config& config, int replicas) {
  if (replicas == 1 || !config.IsSet("DMLC_NUM_WORKER")) {
    return Choose(config, "WORLD_SIZE", "DMLC_NUM_WORKER", 1);
  }
  const auto all = static_cast<int>(config.Int("DMLC_NUM_WORKER"));
  const auto own =
      config.IsSet("WORLD_SIZE") ? static_cast<int>(config.Int("WORLD_SIZE")) : all / replicas;
  if (all != own * replicas) {
    throw UsageError("DMLC_NUM_WORKER=" + std::to_string(all) + " is not " +
                     std::to_string(replicas) + " replicas (BYTEPS_REPLICA) of equal size" +
                     (config.IsSet("WORLD_SIZE") ? ", WORLD_SIZE=" + std::to_string(own) : ""));
  }
  return own;
}

}  // namespace

bool UsesRdma(const Config& config) {
  const std::string& transport = config.String("DMLC_ENABLE_RDMA");
  return transport == "ibverbs" || transport == "1";
}

LocalPlace LocalPlace::From(const Config& config) {
  return {Prefer(config, "BYTEPS_LOCAL_RANK", "LOCAL_RANK"),
          Prefer(config, "BYTEPS_LOCAL_SIZE", "LOCAL_WORLD_SIZE")};
}

Launch Launch::From(const Config& config) {
  Launch launch;
  std::tie(launch.replica, launch.replicas) = ReplicaOf(config);
  launch.rank = Choose(config, "RANK", "DMLC_WORKER_ID", 0);
  launch.size = WorkersOfReplica(config, launch.replicas);
  const LocalPlace local = LocalPlace::From(config);
  launch.local_rank = local.rank;
  launch.local_size = local.size;
  if (launch.rank >= launch.size) {
    throw UsageError("the rank " + std::to_string(launch.rank) +
                     " (RANK, DMLC_WORKER_ID) is not below the number of workers, " +
                     std::to_string(launch.size) + " (WORLD_SIZE, DMLC_NUM_WORKER)");
  }
  launch.rank += launch.replica * launch.size;
  launch.size *= launch.replicas;
  return launch;
}

}  // namespace core
}  // namespace byteps
