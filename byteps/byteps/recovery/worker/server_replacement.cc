#include "byteps/recovery/worker/server_replacement.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "byteps/base/invariant.h"
#include "byteps/base/log.h"
#include "byteps/base/shared_bytes.h"
#include "byteps/base/wire.h"
#include "byteps/engine/declarations.h"
#include "byteps/engine/engine_context.h"

namespace byteps {
namespace core {
namespace {

// Limit of sums in flight to a successor: enough to keep a link busy, with little memory in the
// transport.
constexpr size_t kGivenAtOnce = 8;

}  // namespace

std::unique_ptr<LossPolicy> MakeLossPolicy(const Config& config, int num_servers) {
  if (config.Float("BYTEPS_REPLACE_SERVERS_S") <= 0) return std::make_unique<LossPolicy>();
  return std::make_unique<ServerReplacement>(config.Bool("BYTEPS_BACKUP_STATE"), num_servers);
}

ServerReplacement::ServerReplacement(bool has_backups, int num_servers)
    : has_backups_(has_backups), places_(num_servers), kept_(num_servers) {}

int ServerReplacement::ServerOf(uint64_t turn) const {
  const auto match = std::find_if(places_.begin(), places_.end(),
                                  [turn](const Place& place) { return place.turn == turn; });
  return turn == 0 || match == places_.end() ? -1 : static_cast<int>(match - places_.begin());
}

// ------------------------------------------------------------------ while no server is lost

void ServerReplacement::Complete(PushHeader* header, int server) {
  header->flags |= PushHeader::kKeepsSums;
  header->confirmed = context_->requests.FirstOpen(server);
}

std::string ServerReplacement::Send(int server, const std::function<std::string(bool)>& send) {
  ps::ReaderLock lock(&mu_);
  return send(!places_[server].is_vacant);
}

bool ServerReplacement::TakeRequest(Message* answer, Request* request) {
  ps::ReaderLock lock(&mu_);
  const bool is_open = context_->requests.Peek(answer->number, request);
  // If the server is lost, its successor may already have received the kept sums.
  if (is_open && places_[request->server].is_vacant) {
    PS_PROBE(kAnswerOfLost);
    return false;
  }
  if (!context_->requests.Take(answer->number, request)) return false;
  if (answer->failed || request->operation->request.op != kPushPull) return true;
  try {
    KeepSum(answer, *request);
  } catch (const std::exception& e) {  // fails the operation
    answer->failed = true;
    answer->body = e.what();
  }
  return true;
}

void ServerReplacement::KeepSum(Message* answer, const Request& request) {
  const Operation& operation = *request.operation;
  KeptAnswer head;
  if (!KeptAnswer::Take(&answer->body, &head)) {
    throw Error("the answer of " + context_->channel->NameOfServer(request.server) + " about '" +
                operation.name() + "' does not say who lacks the sum");
  }
  KeptSum sum;
  sum.tensor = operation.tensor;
  sum.index = request.index;
  sum.round = operation.round;
  sum.serial = head.serial;
  sum.lacks = answer->body;
  if (operation.Wanted(request.index).bytes == operation.Whole(request.index).bytes) {
    sum.values = answer->values;
    if (context_->channel->RegistersMemory()) {  // the transport needs its memory back
      sum.values = SharedBytes::New(answer->values.size());
      memcpy(sum.values.data(), answer->values.data(), answer->values.size());
    }
  }
  kept_.Keep(request.server, std::move(sum));
  kept_.Drop(request.server, *operation.tensor, request.index,
             std::min(head.ended, operation.round));
  kept_.DropBefore(request.server, head.with_all);
}

bool ServerReplacement::IsVacant(int server) {
  ps::ReaderLock lock(&mu_);
  return places_[server].is_vacant;
}

void ServerReplacement::OnReleased(int server, const Tensor& tensor) {
  kept_.DropAll(server, tensor);
}

bool ServerReplacement::OnAnswer(const Message& message) {
  if (message.op == kResume) return OnResumed(message), true;
  if (message.op == kGiveSum) return OnGiven(message), true;
  if (message.op == kConfirm) return OnConfirmed(message), true;
  return false;
}

void ServerReplacement::OnTick() {
  for (int server = 0; server < context_->plan.num_servers(); ++server) {
    ps::ReaderLock lock(&mu_);
    if (places_[server].is_vacant || context_->requests.HasOpen(server)) continue;
    if (!kept_.Has(server)) continue;
    WireWriter out;
    out.Put(context_->requests.FirstOpen(server));
    const uint64_t number = places_[server].came_in_turn;
    context_->channel->Send(MakeRequest(kConfirm, server, 0, number, out.Take()));
  }
}

void ServerReplacement::OnConfirmed(const Message& answer) {
  ps::ReaderLock lock(&mu_);
  // A successor starts its serial numbers anew.
  if (answer.failed || places_[answer.peer].came_in_turn != answer.number) return;
  WireReader in(answer.body);
  kept_.DropBefore(answer.peer, in.Get<uint64_t>());
}

// ------------------------------------------------------------------ lost

void ServerReplacement::OnServerLost(int server, const std::string& reason) {
  const std::string name = has_backups_ ? "" : declarations_->AnyUpdated();
  if (!name.empty()) {
    return fail_(reason + "; the optimizer state that it had of '" + name +
                 "' and of others is lost with it: load the last checkpoint, or set "
                 "BYTEPS_BACKUP_STATE=1 on all nodes before");
  }
  BPS_LOG(WARNING) << reason << "; waiting for another server, with " << kept_.bytes()
                   << " bytes of sums that others may lack";
  context_->vacancies.Lost(server);
  kept_.ForgetSerials(server);
  ps::WriterLock lock(&mu_);
  places_[server].is_vacant = true;
  places_[server].turn = 0;
}

// ------------------------------------------------------------------ replaced

void ServerReplacement::OnServerReplaced(int server) {
  context_->vacancies.Replaced(server);
  uint64_t turn = 0;
  {
    ps::WriterLock lock(&mu_);
    Place& place = places_[server];
    if (!place.is_vacant) return;
    turn = place.turn = place.came_in_turn = ++last_turn_;
  }
  declarations_->TellAgain(server, [this, server, turn](const std::string& error) {
    error.empty() ? SendResume(server, turn) : fail_(error);
  });
}

void ServerReplacement::SendResume(int server, uint64_t turn) {
  // First round of each tensor that this worker may still push, or whose sum it may give.
  std::map<uint64_t, uint32_t> first = declarations_->OldestRounds();
  for (const KeptSum& sum : kept_.Of(server)) {
    uint32_t& oldest = first[sum.tensor->key];
    oldest = std::min(oldest, sum.round);
  }
  WireWriter out;
  out.PutSize(first.size());
  for (const auto& [key, round] : first) {
    out.Put(key);
    out.Put(round);
  }
  context_->channel->Send(MakeRequest(kResume, server, 0, turn, out.Take()));
}

void ServerReplacement::OnResumed(const Message& answer) {
  int server = 0;
  {
    ps::WriterLock lock(&mu_);
    server = ServerOf(answer.number);
    if (server < 0) return PS_PROBE(kReplacedAgain);
    const std::vector<KeptSum> kept_sums = kept_.Of(server);
    places_[server].to_give = {kept_sums.begin(), kept_sums.end()};
    places_[server].given_in_flight = 0;
  }
  if (answer.failed) return fail_(answer.body);
  GiveNext(server, answer.number);
}

void ServerReplacement::GiveNext(int server, uint64_t turn) {
  std::vector<KeptSum> next;
  {
    ps::WriterLock lock(&mu_);
    Place& place = places_[server];
    if (place.turn != turn) return PS_PROBE(kReplacedAgain);
    while (place.given_in_flight < kGivenAtOnce && !place.to_give.empty()) {
      next.push_back(std::move(place.to_give.front()));
      place.to_give.pop_front();
      ++place.given_in_flight;
    }
    if (place.given_in_flight > 0 && next.empty()) return;
  }
  if (next.empty()) return GoOn(server, turn);
  for (const KeptSum& sum : next) Give(server, turn, sum);
}

void ServerReplacement::Give(int server, uint64_t turn, const KeptSum& sum) {
  PS_PROBE(kSumGiven);
  PushHeader header;
  header.round = sum.round;
  header.flags = PushHeader::kKeepsSums;
  Message message =
      MakeRequest(kGiveSum, server, sum.tensor->key + sum.index, turn, header.Pack() + sum.lacks);
  message.SetValues(sum.values);
  context_->channel->Send(message);
}

void ServerReplacement::OnGiven(const Message& answer) {
  int server = 0;
  {
    ps::WriterLock lock(&mu_);
    server = ServerOf(answer.number);
    if (server < 0) return;
    --places_[server].given_in_flight;
  }
  if (answer.failed) return fail_(answer.body);
  WireReader in(answer.body);
  const auto round = in.Get<uint32_t>();
  kept_.SetSerial(server, answer.key, round, in.Get<uint64_t>());
  GiveNext(server, answer.number);
}

void ServerReplacement::GoOn(int server, uint64_t turn) {
  std::vector<Request> open;
  {
    ps::WriterLock lock(&mu_);
    Place& place = places_[server];
    if (place.turn != turn) return PS_PROBE(kReplacedAgain);
    place.turn = 0;
    place.is_vacant = false;
    open = context_->requests.TakeBack(server);
  }
  BPS_LOG(INFO) << context_->channel->NameOfServer(server) << " has taken over; " << open.size()
                << " partitions are pushed again";
  declarations_->ReleaseAgain(server);
  for (Request& request : open) PushAgain(std::move(request));
}

void ServerReplacement::PushAgain(Request request) {
  PS_PROBE(kPushedAgain);
  const OperationPtr& operation = request.operation;
  Task task;
  task.operation = operation;
  task.index = request.index;
  task.server = request.server;
  task.bytes = operation->Sent(request.index).bytes;
  task.again = true;
  // The lost server's unanswered bytes no longer count in its window.
  context_->scheduler->Answer(request.server, task.bytes);
  operation->Restart(request.index);
  context_->scheduler->Add(operation->request.priority, {std::move(task)});
}

}  // namespace core
}  // namespace byteps
