// Tensors that members release, members that leave or are absent, and when a server frees tensors.
#include <algorithm>
#include <cstring>
#include <iterator>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "byteps/base/invariant.h"
#include "byteps/base/protocol.h"
#include "byteps/base/shared_bytes.h"
#include "byteps/base/wire.h"
#include "byteps/server/sum_server.h"

namespace byteps {
namespace core {

void SumServer::OnRelease(const Message& message) {
  const int rank = message.peer;
  WireReader in(message.body);
  const uint32_t count = in.GetCount(sizeof(uint64_t));
  auto releasing = std::make_shared<Releasing>();
  *releasing = {rank, message.number, message.key, 1};
  Owed owed{releasing};
  {
    ps::WriterLock lock(&mu_);
    for (uint32_t i = 0; i < count; ++i) {
      const auto it = tensors_.find(in.Get<uint64_t>());
      if (it == tensors_.end() || it->second->declaration.MemberIndex(rank) < 0) continue;
      const TensorPtr tensor = it->second;
      ++releasing->left;
      tensor->releasing.push_back(releasing);
      tensor->SetHold(rank, false);
      tensor->released_by = rank;
      if (tensor->holders > 0) {
        for (auto& thread : threads_) thread->Release(tensor, rank);
      }
      FreeIfUnused(tensor, &owed);
    }
  }
  AnswerReleases(owed);
}

void SumServer::OnConfirm(const Message& message) {
  WireReader in(message.body);
  context_.confirmations.Confirm(message.peer, in.Get<uint64_t>());
  WireWriter out;
  out.Put(context_.confirmations.FirstOpen());
  const std::string body = out.Take();
  SharedBytes note = SharedBytes::New(body.size());
  memcpy(note.data(), body.data(), body.size());
  context_.Answer(Caller{message.peer, message.number, message.op}, message.key, "", nullptr,
                  &note);
}

void SumServer::FreeIfUnused(const TensorPtr& tensor, Owed* owed) {
  if (tensor->holders > 0) return;
  const Declaration& declaration = tensor->declaration;
  const auto is_settled = [this](uint32_t rank) PS_REQUIRES(mu_) {
    return settled_.count(static_cast<int>(rank)) > 0;
  };
  // A member that has not resumed yet may want what others give.
  if (is_successor_ &&
      !std::all_of(declaration.group.begin(), declaration.group.end(), is_settled)) {
    return PS_PROBE(kFreedHeld);
  }
  PS_PROBE(kTensorFreed);
  std::vector<std::vector<std::shared_ptr<Partition>>> of_threads(threads_.size());
  const uint64_t key = declaration.Key();
  for (uint64_t i = 0; i < declaration.NumPartitions(); ++i) {
    const auto it = partitions_.find(key + i);
    if (it != partitions_.end()) of_threads[it->second->thread].push_back(it->second);
  }
  for (size_t i = 0; i < threads_.size(); ++i) {
    if (!of_threads[i].empty()) threads_[i]->Free(std::move(of_threads[i]));
  }
  if (declaration.rule) {
    state_memory_.Return(declaration, context_.channel->rank(), backup_.is_on());
  }
  owed->insert(owed->end(), tensor->releasing.begin(), tensor->releasing.end());
  tensor->releasing.clear();
  tensors_.erase(key);
}

void SumServer::OnFreed(const Partition& partition) {
  ps::WriterLock lock(&mu_);
  const auto it = partitions_.find(partition.key);
  if (it != partitions_.end() && it->second.get() == &partition) partitions_.erase(it);
}

void SumServer::AnswerReleases(const Owed& owed) {
  Owed due;
  {
    ps::WriterLock lock(&mu_);
    for (const auto& releasing : owed) {
      if (--releasing->left == 0) due.push_back(releasing);
    }
  }
  for (const auto& releasing : due) {
    context_.Answer(Caller{releasing->rank, releasing->request, kRelease}, releasing->key, "");
  }
}

void SumServer::OnWorkerGone(int rank, const std::string& reason) {
  context_.confirmations.SetGone(rank);
  for (auto& thread : threads_) thread->OnWorkerGone(rank, reason);
  DropHolds({rank}, false);
}

void SumServer::SetAbsent(const std::set<int>& ranks) {
  context_.confirmations.SetAbsent(ranks);
  for (auto& thread : threads_) thread->SetAbsent(ranks);
  std::set<int> lost;
  {
    ps::WriterLock lock(&mu_);
    std::set_difference(ranks.begin(), ranks.end(), absent_.begin(), absent_.end(),
                        std::inserter(lost, lost.end()));
    absent_ = ranks;
  }
  DropHolds(lost, true);
}

void SumServer::DropHolds(const std::set<int>& ranks, bool may_return) {
  Owed owed;
  {
    ps::WriterLock lock(&mu_);
    settled_.insert(ranks.begin(), ranks.end());
    std::vector<TensorPtr> unused;
    for (const auto& [key, tensor] : tensors_) {
      for (const int rank : ranks) tensor->SetHold(rank, false);
      // A tensor that nobody has released is for those who return.
      const bool is_over = !may_return || tensor->released_by >= 0;
      if (tensor->holders == 0 && is_over) unused.push_back(tensor);
    }
    for (const TensorPtr& tensor : unused) FreeIfUnused(tensor, &owed);
  }
  AnswerReleases(owed);
}

void SumServer::Settle(int rank) {
  Owed owed;
  {
    ps::WriterLock lock(&mu_);
    is_successor_ = true;
    settled_.insert(rank);
    std::vector<TensorPtr> unused;
    for (const auto& [key, tensor] : tensors_) {
      if (tensor->holders == 0) unused.push_back(tensor);
    }
    for (const TensorPtr& tensor : unused) FreeIfUnused(tensor, &owed);
  }
  AnswerReleases(owed);
}

}  // namespace core
}  // namespace byteps
