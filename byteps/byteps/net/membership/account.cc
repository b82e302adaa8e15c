#include "byteps/net/membership/account.h"

#include <cinttypes>
#include <cstdio>
#include <sstream>

namespace ps {
namespace membership {

std::string PackAccount(const Account& account) {
  std::ostringstream text;
  text << "\njob=" << account.job << " life=" << account.life
       << " late=" << (account.is_late ? 1 : 0) << " turns=" << PackTurns(account.turns)
       << " left=";
  for (const int rank : account.left) text << rank << ",";
  text << "\n";
  if (account.replicas.count() > 1) text << PackReplicas(account.replicas);
  return text.str();
}

bool ParseAccount(const std::string& text, Account* account) {
  *account = Account();
  const size_t begin = text.find('\n');
  if (begin == std::string::npos) return true;
  const size_t end = text.find('\n', begin + 1);
  if (end == std::string::npos) return false;
  const std::string line = text.substr(begin + 1, end - begin - 1);
  int late = 0, at = 0;
  if (sscanf(line.c_str(), "job=%20" SCNu64 " life=%9d late=%1d turns=%n", &account->job,
             &account->life, &late, &at) != 3 ||
      at == 0 || account->job == 0 || account->life < 1) {
    return false;
  }
  static const std::string kLeft = " left=";
  const size_t turns_end = line.find(kLeft, at);
  if (turns_end == std::string::npos ||
      !ParseTurns(line.substr(at, turns_end - at), &account->turns)) {
    return false;
  }
  account->is_late = late == 1;
  std::istringstream left(line.substr(turns_end + kLeft.size()));
  for (std::string one; std::getline(left, one, ',');) {
    int rank = -1;
    if (sscanf(one.c_str(), "%9d", &rank) != 1 || rank < 0) return false;
    account->left.insert(rank);
  }
  const std::string view = text.substr(end + 1);
  return view.empty() || ParseReplicas(view, &account->replicas);
}

}  // namespace membership
}  // namespace ps
