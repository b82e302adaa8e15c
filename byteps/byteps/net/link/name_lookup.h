#ifndef BYTEPS_NET_LINK_NAME_LOOKUP_H_
#define BYTEPS_NET_LINK_NAME_LOOKUP_H_

#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "byteps/base/mutex.h"
#include "byteps/net/link/net_address.h"

namespace ps {

// A lookup by a thread of its own.  It may take seconds, and who dials serves other connections
// meanwhile.
class NameLookup {
 public:
  using Found = std::map<std::string, std::vector<Address>>;

  NameLookup(const std::set<std::string>& hosts, int port);

  // True once it is over: adds to `found` the names that are known, and sets `error` to what is
  // said of another one.
  bool Take(Found* found, std::string* error);

 private:
  // Shared with the thread, which may outlive this.
  struct Answer {
    Mutex mu;
    bool is_over PS_GUARDED_BY(mu) = false;
    Found found PS_GUARDED_BY(mu);
    std::string error PS_GUARDED_BY(mu);
  };

  const std::shared_ptr<Answer> answer_ = std::make_shared<Answer>();
};

}  // namespace ps
#endif  // BYTEPS_NET_LINK_NAME_LOOKUP_H_
