#include "byteps/cluster/session.h"

#include <gtest/gtest.h>

#include <string>

#include "byteps/base/config.h"
#include "byteps/cluster/channel.h"
#include "byteps/net/membership/event.h"
#include "tests/support/kit.h"

namespace byteps {
namespace core {
namespace {

class Silent : public ChannelUser {
 public:
  void OnMessage(Message* /*message*/) override {}
  void OnEvent(const ps::MembershipEvent& /*event*/) override {}
};

// Calls everything that threads of a server or worker may call after their session has stopped.
void CallAll(Session* session) {
  session->Send(MakeRequest(kDeclare, 0, 0, 0, "nobody gets it"));
  session->ReceiveReady();
  const std::string memory = "nothing is received here";
  session->Abandon(memory.data(), memory.size());
  session->Leave({});
  session->SayReady();
  session->AskToAdmit(0, 1);
  session->SayAwaited(0, "tensor", 3);
  session->SayLate(0, "it had not pushed");
  EXPECT_TRUE(session->AllArrived());
  EXPECT_FALSE(session->RegistersMemory());
  EXPECT_FALSE(session->is_late());
  EXPECT_FALSE(session->lacks_scheduler());
  EXPECT_EQ(session->link_gbps(), 0);
  EXPECT_EQ(session->num_nics(), 1);
  session->NameOfServer(0);
  EXPECT_EQ(session->HostOfServer(0), "");
  session->NameOfWorker(1);
  session->StopByOrder("stopped by a test");
}

TEST(SessionTest, EveryMethodAnswersBeforeStartAndAfterStop) {
  const Config config = ConfigWith(
      {{"DMLC_PS_ROOT_URI", "127.0.0.1"}, {"DMLC_PS_ROOT_PORT", "0"}, {"BYTEPS_AUTH", "0"}});
  Silent user;
  SessionOptions options;
  options.role = Role::kScheduler;
  Session session(config, options);
  CallAll(&session);
  session.Start(&user);
  const int port = session.port();
  EXPECT_GT(port, 0);
  session.Stop();
  CallAll(&session);
  EXPECT_EQ(session.rank(), 0);
  EXPECT_EQ(session.port(), port);
}

}  // namespace
}  // namespace core
}  // namespace byteps
