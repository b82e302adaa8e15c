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

// Name lookup in a thread of its own, because a lookup may take seconds, and the thread that dials
// also serves other connections.
class NameLookup {
 public:
  using Found = std::map<std::string, std::vector<Address>>;

  NameLookup(const std::set<std::string>& hosts, int port);

  // Returns whether the lookup has finished. If so, adds the resolved names to `found`, and sets
  // `error` to the reason if a name did not resolve.
  bool Take(Found* found, std::string* error);

 private:
  // Answer of a lookup. It is shared with the lookup thread, which may outlive this object.
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
