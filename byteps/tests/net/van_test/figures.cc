#include "figures.h"

#include <dirent.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <sstream>

#include "byteps/net/link/endpoint_counters.h"

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

std::vector<std::string> EndpointLines() {
  std::vector<std::string> lines;
  for (const auto& e : ps::ReadEndpointCounters()) {
    std::ostringstream text;
    text << "endpoint peer='" << e.peer << "' plane=" << e.plane << " index=" << e.index
         << " sent=" << e.messages_sent << "/" << e.bytes_sent
         << " received=" << e.messages_received << "/" << e.bytes_received
         << " in_place=" << e.values_in_place << "/" << e.bytes_in_place
         << " in_pool=" << e.values_in_pool << "/" << e.bytes_in_pool
         << " in_frames=" << e.values_in_frames << "/" << e.bytes_in_frames
         << " send_completions=" << e.send_completions;
    lines.push_back(text.str());
  }
  return lines;
}

std::string SpeedLine(uint64_t bytes, double seconds) {
  char text[200];
  snprintf(text, sizeof(text), "%.3f s, %.2f MB/s each way", seconds, bytes / seconds / 1e6);
  return text;
}

std::string DelayLine(std::vector<double>* delays) {
  std::sort(delays->begin(), delays->end());
  char text[200];
  snprintf(text, sizeof(text), "%zu pings, p50 %.3f ms, p99 %.3f ms, max %.3f ms", delays->size(),
           (*delays)[delays->size() / 2] * 1e3, (*delays)[delays->size() * 99 / 100] * 1e3,
           delays->back() * 1e3);
  return text;
}

}  // namespace van_test
