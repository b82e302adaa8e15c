// Every setting, in one table, read from the environment once.
//
// The table is what the program parses by, what `byteps-server --print-config`
// prints and what docs/use/settings.md is made from.
#ifndef BYTEPS_BASE_CONFIG_H_
#define BYTEPS_BASE_CONFIG_H_

#include <map>
#include <string>
#include <unordered_map>
#include <vector>

namespace byteps {
namespace core {

// What a process is in its job.
enum class Role { kScheduler, kServer, kWorker };

inline const char* NameOf(Role role) {
  if (role == Role::kScheduler) return "scheduler";
  return role == Role::kServer ? "server" : "worker";
}

// The highest integer that a setting can have: its range has no upper end.
constexpr double kMaxInt = 2147483647;

struct Variable {
  enum Type { kInt, kFloat, kBool, kString, kChoice };
  // Users set it, and pages tell of it; or the launcher sets it; or it is internal: read for tests,
  // benchmarks and programs of upstream's, and in no page.
  enum Audience { kUsers, kLauncher, kInternal };
  const char* name;
  Type type;
  const char* unit;      // "" for none
  const char* fallback;  // the default, as text; "" for none
  double low;            // numbers: least and greatest allowed value
  double high;
  const char* choices;  // kChoice: the values, separated by '|'
  const char* doc;
  Audience audience = kUsers;
};

// A variable of an earlier version.
struct GoneVariable {
  const char* name;
  const char* instead;  // what to set, or why there is nothing to set
};

// A variable that has our prefix, and is none of ours.
struct UnknownVariable {
  std::string name;
  std::string meant;  // the name that was probably meant; empty where none is near

  // A warning.
  std::string Describe() const;
};

// Values that the caller knows better than the environment, by the variable's name.
using GivenSettings = std::map<std::string, std::string>;

// One process's settings: a checked snapshot of the environment.
class Config {
 public:
  static const std::vector<Variable>& Table();
  static const std::vector<GoneVariable>& Gone();

  // Parses every variable of the table, whole-string.  Throws UsageError naming
  // the first bad variable, its value and what is allowed; and for a variable that is gone.
  // `given` goes before the environment, is checked alike, and counts as set.
  static Config FromEnvironment(const GivenSettings& given = {});

  // Each asks for a name of the table with the matching type; anything else is a
  // mistake of the program and throws std::logic_error.
  long Int(const std::string& name) const;
  double Float(const std::string& name) const;
  bool Bool(const std::string& name) const;
  const std::string& String(const std::string& name) const;  // also kChoice
  // Whether the environment or the caller sets it.
  bool IsSet(const std::string& name) const;

  // One "NAME=value" line each, with "# default" behind those that are not set.  Internal ones are
  // printed where they are set.
  std::string Print() const;

  // The type of a variable of the table.  Throws std::logic_error for another name.
  static Variable::Type TypeOf(const std::string& name);

  // The BYTEPS_* and DMLC_* variables of the environment that the table does not know.
  static std::vector<UnknownVariable> UnknownVariables();

  // The reference manual, as Markdown.
  static std::string Markdown();

 private:
  const std::string& Value(const std::string& name, Variable::Type type) const;

  std::unordered_map<std::string, std::string> values_;
  std::unordered_map<std::string, bool> set_;
};

// Whether the settings choose RDMA, not TCP.
bool UsesRdma(const Config& config);

// This process's number among those of its host, and how many workers these are.
struct LocalPlace {
  int rank = 0;
  int size = 1;

  // From BYTEPS_LOCAL_RANK and BYTEPS_LOCAL_SIZE, else from LOCAL_RANK and LOCAL_WORLD_SIZE: some
  // launchers tell every worker that it is alone on its host.
  static LocalPlace From(const Config& config);
};

// This process's place among the workers.
struct Launch {
  int rank = 0;
  int size = 1;
  int local_rank = 0;
  int local_size = 1;
  // Jobs that train one model, each with ranks of its own, are its replicas.  `rank` and `size` are
  // those among the workers of all replicas.
  int replica = 0;
  int replicas = 1;

  // From RANK and WORLD_SIZE, else from DMLC_WORKER_ID and DMLC_NUM_WORKER, else 0 of 1; from
  // LocalPlace; and from BYTEPS_REPLICA.  Throws UsageError when the first two pairs disagree, or
  // the rank is not below the size, or BYTEPS_REPLICA is no replica of so many.
  static Launch From(const Config& config);
};

}  // namespace core
}  // namespace byteps

#endif  // BYTEPS_BASE_CONFIG_H_
