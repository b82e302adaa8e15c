// What a worker does where a server is lost, and another one takes its place:
//
//   lost      nothing is sent to it any more
//   replaced  the new one is told of all tensors, then where this worker goes on in each of them,
//             then it is given the sums that were kept; when it has them, what the old one had not
//             answered is pushed again
#include <algorithm>
#include <utility>
#include <vector>

#include "byteps/base/invariant.h"
#include "byteps/base/log.h"
#include "byteps/base/protocol.h"
#include "byteps/base/wire.h"
#include "byteps/engine/engine.h"
#include "byteps/engine/kept_sums.h"
#include "byteps/engine/pusher.h"
#include "byteps/engine/server_loss.h"
#include "byteps/engine/staged_sum.h"

namespace byteps {
namespace core {
namespace {

// Sums in flight to a server that comes: enough to keep a link busy, and little memory of the
// transport's.
constexpr size_t kGivenAtOnce = 8;

}  // namespace

// ------------------------------------------------------------------ lost

void Engine::OnServerLost(int server, const std::string& reason) {
  if (!context_.loss.keeps) {
    return Fail(reason + "; this worker has kept no sums from which another server could go on: " +
                "set BYTEPS_REPLACE_SERVERS_S on all nodes");
  }
  const std::string name = context_.loss.has_backups ? "" : declarations_.AnyUpdated();
  if (!name.empty()) {
    return Fail(reason + "; the optimizer state that it had of '" + name +
                "' and of others is lost with it: load the last checkpoint, or set "
                "BYTEPS_BACKUP_STATE=1 on all nodes before");
  }
  BPS_LOG(WARNING) << reason << "; waiting for another server, with " << context_.loss.kept.bytes()
                   << " bytes of sums that others may lack";
  context_.vacancies.Lost(server);
  context_.loss.kept.ForgetSerials(server);
  ps::WriterLock lock(&context_.loss.mu);
  context_.loss.held[server] = true;
  context_.loss.turns[server] = 0;
}

// ------------------------------------------------------------------ replaced

void Engine::OnServerReplaced(int server) {
  context_.vacancies.Replaced(server);
  uint64_t turn = 0;
  {
    ps::WriterLock lock(&context_.loss.mu);
    if (!context_.loss.keeps || !context_.loss.held[server]) return;
    turn = context_.loss.turns[server] = context_.loss.came[server] = ++context_.loss.last_turn;
  }
  declarations_.TellAgain(server, [this, server, turn](const std::string& error) {
    error.empty() ? SayResumes(server, turn) : Fail(error);
  });
}

void Engine::SayResumes(int server, uint64_t turn) {
  // By tensor: the first round that may still be pushed, or whose sum may be given.
  std::map<uint64_t, uint32_t> first = declarations_.OldestRounds();
  for (const KeptSum& sum : context_.loss.kept.Of(server)) {
    uint32_t& oldest = first[sum.tensor->key];
    oldest = std::min(oldest, sum.round);
  }
  WireWriter out;
  out.PutSize(first.size());
  for (const auto& [key, round] : first) {
    out.Put(key);
    out.Put(round);
  }
  context_.channel->Send(MakeRequest(kResume, server, 0, turn, out.Take()));
}

void Engine::OnResumed(const Message& answer) {
  int server = 0;
  {
    ps::WriterLock lock(&context_.loss.mu);
    server = context_.loss.ServerOf(answer.number);
    if (server < 0) return PS_PROBE(kReplacedAgain);
    const std::vector<KeptSum> kept = context_.loss.kept.Of(server);
    context_.loss.gifts[server] = {{kept.begin(), kept.end()}, 0};
  }
  if (answer.failed) return Fail(answer.body);
  GiveNext(server, answer.number);
}

void Engine::GiveNext(int server, uint64_t turn) {
  std::vector<KeptSum> next;
  {
    ps::WriterLock lock(&context_.loss.mu);
    if (context_.loss.turns[server] != turn) return PS_PROBE(kReplacedAgain);
    ServerLoss::Gifts& gifts = context_.loss.gifts[server];
    while (gifts.in_flight < kGivenAtOnce && !gifts.waiting.empty()) {
      next.push_back(std::move(gifts.waiting.front()));
      gifts.waiting.pop_front();
      ++gifts.in_flight;
    }
    if (gifts.in_flight > 0 && next.empty()) return;
  }
  if (next.empty()) return GoOn(server, turn);
  for (const KeptSum& sum : next) Give(server, turn, sum);
}

void Engine::Give(int server, uint64_t turn, const KeptSum& sum) {
  PS_PROBE(kSumGiven);
  PushHeader header;
  header.round = sum.round;
  header.flags = PushHeader::kKeepsSums;
  Message message =
      MakeRequest(kGiveSum, server, sum.tensor->key + sum.index, turn, header.Pack() + sum.lacks);
  message.SetValues(sum.values);
  context_.channel->Send(message);
}

void Engine::OnGiven(const Message& answer) {
  int server = 0;
  {
    ps::WriterLock lock(&context_.loss.mu);
    server = context_.loss.ServerOf(answer.number);
    if (server < 0) return;
    --context_.loss.gifts[server].in_flight;
  }
  if (answer.failed) return Fail(answer.body);
  WireReader in(answer.body);
  const auto round = in.Get<uint32_t>();
  context_.loss.kept.SetSerial(server, answer.key, round, in.Get<uint64_t>());
  GiveNext(server, answer.number);
}

void Engine::Confirm() {
  if (!context_.loss.keeps) return;
  for (int server = 0; server < context_.plan.num_servers(); ++server) {
    ps::ReaderLock lock(&context_.loss.mu);
    if (context_.loss.held[server] || context_.requests.HasOpen(server)) continue;
    if (!context_.loss.kept.Has(server)) continue;
    WireWriter out;
    out.Put(context_.requests.FirstOpen(server));
    const uint64_t number = context_.loss.came[server];
    context_.channel->Send(MakeRequest(kConfirm, server, 0, number, out.Take()));
  }
}

void Engine::OnConfirmed(const Message& answer) {
  ps::ReaderLock lock(&context_.loss.mu);
  // A server that was replaced counts serials anew.
  if (answer.failed || context_.loss.came[answer.peer] != answer.number) return;
  WireReader in(answer.body);
  context_.loss.kept.DropBefore(answer.peer, in.Get<uint64_t>());
}

void Engine::GoOn(int server, uint64_t turn) {
  std::vector<Request> open;
  {
    ps::WriterLock lock(&context_.loss.mu);
    if (context_.loss.turns[server] != turn) return PS_PROBE(kReplacedAgain);
    context_.loss.turns[server] = 0;
    context_.loss.held[server] = false;
    open = context_.requests.TakeBack(server);
  }
  BPS_LOG(INFO) << context_.channel->NameOfServer(server) << " has taken over; " << open.size()
                << " partitions are pushed again";
  declarations_.ReleaseAgain(server);
  for (Request& request : open) PushAgain(std::move(request));
}

void Engine::PushAgain(Request request) {
  PS_PROBE(kPushedAgain);
  const OperationPtr& operation = request.operation;
  Task task;
  task.operation = operation;
  task.index = request.index;
  task.server = request.server;
  task.bytes = operation->Sent(request.index).bytes;
  task.again = true;
  // It was not answered; but nobody waits for its values any more.
  context_.scheduler->Answer(request.server, task.bytes);
  operation->Restart(request.index);
  context_.scheduler->Add(operation->request.priority, {std::move(task)});
}

}  // namespace core
}  // namespace byteps
