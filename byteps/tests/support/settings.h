// Settings of a test, as a process would find them in its environment.
#ifndef BYTEPS_TESTS_SUPPORT_SETTINGS_H_
#define BYTEPS_TESTS_SUPPORT_SETTINGS_H_

#include <cstdlib>
#include <map>
#include <string>

#include "byteps/base/config.h"

namespace byteps {
namespace core {

using Settings = std::map<std::string, std::string>;

inline Config ConfigWith(const Settings& settings) {
  for (const auto& s : settings) setenv(s.first.c_str(), s.second.c_str(), 1);
  const Config config = Config::FromEnvironment();
  for (const auto& s : settings) unsetenv(s.first.c_str());
  return config;
}

inline Launch LaunchOf(int rank, int workers) {
  Launch launch;
  launch.rank = rank;
  launch.size = workers;
  return launch;
}

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_TESTS_SUPPORT_SETTINGS_H_
