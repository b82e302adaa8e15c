// Tests of host names whose addresses change, or become known only later.
#include "byteps/net/link/name_service.h"

#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "byteps/base/mutex.h"
#include "byteps/net/link/dial_plan.h"
#include "byteps/net/link/name_service.h"

namespace ps {
namespace {

using std::chrono::milliseconds;

const DialPlan::Clock::time_point kStart{};

// Installs a resolver whose answers the test can change, like those for a recreated pod.
class ChangingNames {
 public:
  ChangingNames() { NameService::Set(names_); }
  ~ChangingNames() { NameService::Set(nullptr); }

  void Answer(const std::string& address) {
    MutexLock lock(&names_->mu);
    names_->address = address;
  }

 private:
  struct Names : NameService {
    std::vector<Address> Find(const std::string& host, int port) override {
      MutexLock lock(&mu);
      if (address.empty()) throw UnknownHost(host + " is not known");
      return Resolve(address, port);
    }

    Mutex mu;
    std::string address PS_GUARDED_BY(mu);
  };

  // Shared with lookup threads, which may outlive the test.
  const std::shared_ptr<Names> names_ = std::make_shared<Names>();
};

// Fails attempts until the route is `wanted`. If `wanted` is "", until there is no route, for the
// reason given.
void AwaitRoute(DialPlan* plan, const std::string& wanted) {
  std::string found;
  for (int i = 0; i < 30'000 && found != wanted; ++i) {
    try {
      found = plan->Current().Text();
    } catch (const UnknownHost& e) {
      found = e.what();
    }
    if (found != wanted) plan->Failed(found, false, kStart);
    std::this_thread::sleep_for(milliseconds(1));
  }
  EXPECT_EQ(found, wanted);
}

TEST(DialPlan, ANameIsLookedUpAgainAfterEachRound) {
  ChangingNames names;
  DialPlan plan(milliseconds(20), milliseconds(40));
  plan.Begin({{"", "scheduler"}}, 9000, kStart + std::chrono::seconds(5));
  EXPECT_THROW(plan.Current(), UnknownHost);
  AwaitRoute(&plan, "scheduler is not known");
  names.Answer("10.0.0.1");
  AwaitRoute(&plan, "10.0.0.1:9000");
  names.Answer("10.0.0.2");
  AwaitRoute(&plan, "10.0.0.2:9000");
  names.Answer("");  // the last address stays in use
  for (int i = 0; i < 20; ++i) plan.Failed("no answer", false, kStart);
  EXPECT_EQ(plan.Current().Text(), "10.0.0.2:9000");
}

TEST(DialPlan, ANameHasAnotherAddressWhenALinkBroke) {
  ChangingNames names;
  names.Answer("10.0.0.1");
  DialPlan plan(milliseconds(20), milliseconds(40));
  plan.Begin({{"", "scheduler"}}, 9000, kStart);
  AwaitRoute(&plan, "10.0.0.1:9000");
  plan.Succeeded(kStart);
  names.Answer("10.0.0.2");
  plan.Restart(false);
  AwaitRoute(&plan, "10.0.0.2:9000");
}

TEST(NameService, WhoStartsWaitsForAName) {
  ChangingNames names;
  std::thread later([&names] {
    std::this_thread::sleep_for(milliseconds(300));
    names.Answer("127.0.0.1");
  });
  const auto find = [] { return LocalAddressTowards("scheduler", 9000); };
  EXPECT_EQ(AwaitHost(600, find), "127.0.0.1");
  later.join();
}

TEST(NameService, AfterTheLimitItSaysWhichNameIsNotKnown) {
  ChangingNames names;
  try {
    AwaitHost(0.1, [] { return LocalAddressTowards("scheduler", 9000); });
    ADD_FAILURE() << "nobody knows it";
  } catch (const UnknownHost&) {
    ADD_FAILURE() << "it would be tried again";
  } catch (const Error& e) {
    EXPECT_STREQ(e.what(),
                 "the scheduler's address (DMLC_PS_ROOT_URI) is not known: scheduler is not known; "
                 "this was so for 0.1 s (BYTEPS_START_TIMEOUT_S=0.1)");
  }
}

}  // namespace
}  // namespace ps
