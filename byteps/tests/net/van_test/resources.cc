#include "resources.h"

#include <dirent.h>

#include <fstream>
#include <sstream>

namespace van_test {

std::string Resources() {
  std::ifstream status("/proc/self/status");
  std::string line, pinned = "0", resident = "0";
  while (std::getline(status, line)) {
    std::istringstream words(line);
    std::string name, value;
    words >> name >> value;
    if (name == "VmPin:") pinned = value;
    if (name == "VmRSS:") resident = value;
  }
  int files = 0;
  if (DIR* folder = opendir("/proc/self/fd")) {
    while (readdir(folder) != nullptr) ++files;
    closedir(folder);
  }
  return "pinned_kib=" + pinned + " rss_kib=" + resident + " fds=" + std::to_string(files - 3);
}

}  // namespace van_test
