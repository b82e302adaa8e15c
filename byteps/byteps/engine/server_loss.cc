// What a worker does where a server is lost, and another one takes its place:
//
//   lost      nothing is sent to it any more
//   replaced  the new one is told of all tensors, then where this worker goes on in each of them,
//             then it is given the sums that were kept; when it has them, what the old one had not
//             answered is pushed again
#include "byteps/engine/server_loss.h"

#include <algorithm>

#include "byteps/base/error.h"
#include "byteps/base/log.h"
#include "byteps/base/probe.h"
#include "byteps/base/wire.h"
#include "byteps/engine/engine.h"

namespace byteps {
namespace core {

void KeptSums::Keep(int server, KeptSum sum) {
  const Key key(sum.tensor->key + sum.index, sum.round);
  ps::MutexLock lock(&mu_);
  bytes_ += sum.values.size();
  servers_[server][key] = std::move(sum);
}

void KeptSums::Drop(int server, const Tensor& tensor, uint64_t index, uint32_t before) {
  std::vector<KeptSum> gone;  // without the lock
  ps::MutexLock lock(&mu_);
  auto& sums = servers_[server];
  const uint64_t key = tensor.key + index;
  for (auto it = sums.lower_bound({key, 0}); it != sums.end() && it->first < Key(key, before);) {
    bytes_ -= it->second.values.size();
    gone.push_back(std::move(it->second));
    it = sums.erase(it);
  }
}

std::vector<KeptSum> KeptSums::Of(int server) {
  std::vector<KeptSum> sums;
  ps::MutexLock lock(&mu_);
  for (const auto& entry : servers_[server]) sums.push_back(entry.second);
  return sums;
}

uint64_t KeptSums::bytes() {
  ps::MutexLock lock(&mu_);
  return bytes_;
}

int ServerLoss::ServerOf(uint64_t turn) const {
  const auto found = std::find(turns.begin(), turns.end(), turn);
  return turn == 0 || found == turns.end() ? -1 : static_cast<int>(found - turns.begin());
}

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
  ps::WriterLock lock(&context_.loss.mu);
  context_.loss.held[server] = true;
  context_.loss.turns[server] = 0;
}

// ------------------------------------------------------------------ replaced

void Engine::OnServerReplaced(int server) {
  uint64_t turn = 0;
  {
    ps::WriterLock lock(&context_.loss.mu);
    if (!context_.loss.keeps || !context_.loss.held[server]) return;
    turn = context_.loss.turns[server] = ++context_.loss.last_turn;
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
  std::vector<KeptSum> kept;
  {
    ps::WriterLock lock(&context_.loss.mu);
    server = context_.loss.ServerOf(answer.number);
    if (server < 0) return PS_PROBE(kReplacedAgain);
    kept = context_.loss.kept.Of(server);
    context_.loss.gifts[server] = kept.size();
  }
  if (answer.failed) return Fail(answer.body);
  for (const KeptSum& sum : kept) Give(server, answer.number, sum);
  if (kept.empty()) GoOn(server, answer.number);
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
    if (server < 0 || (--context_.loss.gifts[server] > 0 && !answer.failed)) return;
  }
  answer.failed ? Fail(answer.body) : GoOn(server, answer.number);
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
