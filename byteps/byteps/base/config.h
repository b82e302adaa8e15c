// All settings, in a table, read from the environment once.
//
// The program parses by this table, `byteps-server --print-config` prints it, and
// docs/use/settings.md is generated from it.
#ifndef BYTEPS_BASE_CONFIG_H_
#define BYTEPS_BASE_CONFIG_H_

#include <map>
#include <string>
#include <unordered_map>
#include <vector>

namespace byteps {
namespace core {

// Roles of processes in a job.
enum class Role { kScheduler, kServer, kWorker };

inline const char* NameOf(Role role) {
  if (role == Role::kScheduler) return "scheduler";
  return role == Role::kServer ? "server" : "worker";
}

// Upper limit of integer settings that have no other limit.
constexpr double kMaxInt = 2147483647;

struct Variable {
  enum Type { kInt, kFloat, kBool, kString, kChoice };
  // Audience of a variable. kUsers: users set it, and it is documented. kLauncher: the launcher
  // sets it. kInternal: tests, benchmarks and upstream's programs set it; it is not documented.
  enum Audience { kUsers, kLauncher, kInternal };
  const char* name;
  Type type;
  const char* unit;      // unit of the value; "" if it has none
  const char* fallback;  // default as text; "" if there is none
  double low;            // least and greatest allowed number
  double high;
  const char* choices;  // kChoice: allowed values, separated by '|'
  const char* doc;
  Audience audience = kUsers;
};

// Variable of an earlier version, which no longer exists.
struct GoneVariable {
  const char* name;
  const char* instead;  // the variable to set instead, or why no variable is needed
};

// Variable with this project's prefix that does not exist.
struct UnknownVariable {
  std::string name;
  std::string meant;  // the most similar existing name; "" if none is similar

  // Returns the text of a warning.
  std::string Describe() const;
};

// Settings by variable name that override the environment.
using GivenSettings = std::map<std::string, std::string>;

// Settings of a process: a validated snapshot of the environment.
class Config {
 public:
  static const std::vector<Variable>& Table();
  static const std::vector<GoneVariable>& Gone();

  // Parses all variables of the table. Throws UsageError with the first invalid variable, its value
  // and the allowed values, and for a variable that no longer exists. `given` overrides the
  // environment; its settings are validated, too, and count as set.
  static Config FromEnvironment(const GivenSettings& given = {});

  // Return the value of a variable. Throw std::logic_error if the table has no such variable of
  // this type.
  long Int(const std::string& name) const;
  double Float(const std::string& name) const;
  bool Bool(const std::string& name) const;
  const std::string& String(const std::string& name) const;  // for kChoice, too
  // Returns whether the environment or the caller has set the variable.
  bool IsSet(const std::string& name) const;

  // Returns a line "NAME=value" for each variable, with "# default" after variables that are not
  // set. Internal variables are included only if they are set.
  std::string Print() const;

  // Returns the type of a variable. Throws std::logic_error for an unknown name.
  static Variable::Type TypeOf(const std::string& name);

  // Returns the environment's BYTEPS_* and DMLC_* variables that are not in the table.
  static std::vector<UnknownVariable> UnknownVariables();

  // Returns the reference manual in Markdown.
  static std::string Markdown();

 private:
  const std::string& Value(const std::string& name, Variable::Type type) const;

  std::unordered_map<std::string, std::string> values_;
  std::unordered_map<std::string, bool> set_;
};

// Returns whether the settings choose RDMA.
bool UsesRdma(const Config& config);

// This process's rank among the workers of its host, and their number.
struct LocalPlace {
  int rank = 0;
  int size = 1;

  // Reads BYTEPS_LOCAL_RANK and BYTEPS_LOCAL_SIZE or, if they are not set, LOCAL_RANK and
  // LOCAL_WORLD_SIZE. (Some launchers set LOCAL_RANK and LOCAL_WORLD_SIZE as if every worker were
  // alone on its host; the BYTEPS variables override them.)
  static LocalPlace From(const Config& config);
};

// Rank of this process, and number of workers.
struct Launch {
  int rank = 0;
  int size = 1;
  int local_rank = 0;
  int local_size = 1;
  // Replicas are jobs that train the same model, each with ranks of its own. `rank` and `size`
  // count the workers of all replicas.
  int replica = 0;
  int replicas = 1;

  // Reads the rank and size from RANK and WORLD_SIZE, or from DMLC_WORKER_ID and DMLC_NUM_WORKER.
  // Without both pairs, they are 0 and 1. Also reads LocalPlace and BYTEPS_REPLICA. Throws
  // UsageError if the two pairs disagree, if the rank is not below the size, or if BYTEPS_REPLICA
  // is out of range.
  static Launch From(const Config& config);
};

}  // namespace core
}  // namespace byteps

#endif  // BYTEPS_BASE_CONFIG_H_
