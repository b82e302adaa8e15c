#include "byteps/net/link/name_lookup.h"

#include <system_error>
#include <utility>

#include "byteps/base/process.h"
#include "byteps/net/link/name_service.h"

namespace ps {

NameLookup::NameLookup(const std::set<std::string>& hosts, int port) {
  const auto ask = [answer = answer_, names = NameService::Get(), hosts, port] {
    Found addresses;
    std::string error;
    for (const std::string& host : hosts) {
      try {
        addresses[host] = names->Find(host, port);
      } catch (const std::exception& e) {
        error = e.what();
      }
    }
    MutexLock lock(&answer->mu);
    answer->found = std::move(addresses);
    answer->error = std::move(error);
    answer->is_over = true;
  };
  try {
    std::thread([ask] {
      byteps::core::NameThisThread("names");
      ask();
    }).detach();
  } catch (const std::system_error&) {  // no thread available
    ask();
  }
}

bool NameLookup::Take(Found* found, std::string* error) {
  MutexLock lock(&answer_->mu);
  if (!answer_->is_over) return false;
  for (auto& [host, addresses] : answer_->found) (*found)[host] = std::move(addresses);
  *error = answer_->error;
  return true;
}

}  // namespace ps
