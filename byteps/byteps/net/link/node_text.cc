#include "byteps/net/link/node_text.h"

#include <cstdio>

#include "byteps/net/link/net_address.h"
#include "ps/internal/postoffice.h"

namespace ps {
namespace {

const char* RoleName(Node::Role role) {
  if (role == Node::SCHEDULER) return "scheduler";
  return role == Node::WORKER ? "worker" : "server";
}

}  // namespace

std::string Limit(double seconds, const char* variable) {
  char text[128];
  snprintf(text, sizeof(text), "%.1f s (%s=%g)", seconds, variable, seconds);
  return text;
}

std::string Plural(int n, const char* noun) {
  return std::to_string(n) + " " + noun + (n == 1 ? "" : "s");
}

std::chrono::steady_clock::duration ToDuration(double seconds) {
  return std::chrono::duration_cast<std::chrono::steady_clock::duration>(
      std::chrono::duration<double>(seconds));
}

std::string RoleAndRank(int node_id) {
  return std::string(node_id % 2 ? "worker " : "server ") +
         std::to_string(Postoffice::IDtoRank(node_id));
}

std::string AddressOf(const Node& node) {
  return node.port > 0 ? JoinHostPort(node.hostname, node.port) : node.hostname;
}

std::string Describe(const Node& node) {
  std::string name = RoleName(node.role);
  if (node.role == Node::WORKER && node.aux_id >= 0) name += " " + std::to_string(node.aux_id);
  if (node.role == Node::SERVER && node.id != Node::kEmpty && node.id < kRefusedBase) {
    name += " " + std::to_string(Postoffice::IDtoRank(node.id));
  }
  return name + " (" + AddressOf(node) + ")";
}

}  // namespace ps
