#include "byteps/net/tcp/dial_plan.h"

#include <chrono>

#include "byteps/base/error.h"

namespace ps {
namespace tcp {
namespace {

constexpr auto kFirstPause = std::chrono::milliseconds(20);
constexpr auto kLongestPause = std::chrono::milliseconds(500);

}  // namespace

DialPlan::DialPlan() : redial_(kFirstPause, kLongestPause) {}

void DialPlan::Begin(const std::string& host, int port, Clock::time_point deadline) {
  host_ = host;
  port_ = port;
  deadline_ = deadline;
  try {
    addresses_ = Resolve(host, port);
  } catch (const Error&) {  // the name may be known later
  }
}

void DialPlan::Restart() {
  redial_.Begin();
  next_ = 0;
}

const Address& DialPlan::Current() {
  if (addresses_.empty()) addresses_ = Resolve(host_, port_);
  return addresses_[next_];
}

DialPlan::Clock::time_point DialPlan::Failed(const std::string& error, bool nobody_listens,
                                             Clock::time_point now) {
  ++attempt_;
  redial_.Failed(error, nobody_listens, now);
  next_ = addresses_.empty() ? 0 : (next_ + 1) % addresses_.size();
  return next_ == 0 ? now + redial_.NextPause() : now;
}

}  // namespace tcp
}  // namespace ps
