#include "byteps/recovery/server/backup_link.h"

#include <unistd.h>

#include <exception>
#include <new>
#include <utility>

#include "byteps/base/invariant.h"
#include "byteps/base/log.h"
#include "byteps/base/process.h"
#include "byteps/base/wire.h"
#include "byteps/recovery/server/copies.h"
#include "byteps/recovery/server/copy_record.h"

namespace byteps {
namespace core {
namespace {

// Flags of MEET.
constexpr uint8_t kAnswer = 1;    // the receiver must answer
constexpr uint8_t kAnew = 2;      // the receiver must give a new token
constexpr uint8_t kHasState = 4;  // the sender has state, so it does not need the receiver's copy
// Partitions of a state that may be in flight to a restoring server.
constexpr size_t kSentAtOnce = 8;

uint64_t NewInstance() {
  const uint64_t seed[] = {static_cast<uint64_t>(SteadyNs()), static_cast<uint64_t>(getpid())};
  return HashBytes(seed, sizeof(seed), 1) | 1;
}

}  // namespace

BackupLink::BackupLink(bool is_on, int num_servers, size_t num_threads, Channel* channel,
                       BackupUser* user)
    : is_on_(is_on && num_servers > 1),
      num_servers_(num_servers),
      num_threads_(num_threads),
      channel_(channel),
      user_(user),
      instance_(NewInstance()),
      last_token_(instance_ >> 34) {}  // this value differs from those of all predecessors

// ------------------------------------------------------------------ meeting

void BackupLink::Start() {
  if (!is_on_) return;
  const int self = channel_->rank();
  // The server with the lower rank connects (net/link/admission.h).
  if (backup() > self) Meet(backup(), kAnswer);
  if (primary() > self && primary() != backup()) Meet(primary(), kAnswer);
}

void BackupLink::OnServerLost(int rank) {
  if (!is_on_ || rank != backup()) return;
  {
    ps::MutexLock lock(&mu_);
    token_ = 0;
    user_->OnBackup(0);
    fetches_ = false;
    if (awaits_) {
      fetch_error_ = channel_->NameOfServer(rank) +
                     ", which had the copy of this server's state, is lost as well: load the last "
                     "checkpoint";
    }
    awaits_ = false;
  }
  PS_PROBE(kBackupLost);
  user_->OnFetched();
}

void BackupLink::OnServerReplaced(int rank) {
  if (!is_on_ || (rank != backup() && rank != primary())) return;
  bool is_alone = false;
  {
    ps::MutexLock lock(&mu_);
    is_alone = rank == backup() && token_ == 0;
  }
  // The peer connects. It may have sent its MEET before this server knew that the peer's
  // predecessor is lost.
  if (rank < channel_->rank() && !is_alone) return;
  Meet(rank, is_alone ? kAnswer | kAnew : kAnswer);
}

void BackupLink::Meet(int peer, uint8_t flags) {
  WireWriter out;
  out.Put(instance_);
  {
    ps::MutexLock lock(&mu_);
    out.Put(peer == primary() ? last_token_ : 0);
    out.Put(peer == primary() ? instance_with_token_ : 0);
  }
  out.Put<uint8_t>(flags | (peer == backup() && has_state_ ? kHasState : 0));
  Send(kMeet, peer, 0, 0, out.Take(), {});
}

void BackupLink::OnMeet(const Message& message) {
  WireReader in(message.body);
  const auto instance = in.Get<uint64_t>();
  auto token = in.Get<uint64_t>();
  // A token of another instance was given to a predecessor of this server.
  if (in.Get<uint64_t>() != instance_) token = 0;
  const auto flags = in.Get<uint8_t>();
  if (!in.ok() || !in.at_end()) return;
  if (message.peer == primary()) {
    ps::MutexLock lock(&mu_);
    if (instance != instance_with_token_ || (flags & kAnew) != 0) {
      ++last_token_;
      instance_with_token_ = instance;
      sending_.reset();
      if ((flags & kHasState) != 0) {
        copies_.Clear();
        is_whole_ = false;
      }
    }
  }
  // A peer that has given no token does not know this instance yet. This server then sends MEET,
  // and the peer answers.
  const bool needs_token = message.peer == backup() && token == 0;
  if ((flags & kAnswer) != 0) Meet(message.peer, needs_token ? kAnswer : 0);
  if (message.peer == backup() && token != 0) OnToken(instance, token);
}

void BackupLink::OnToken(uint64_t instance, uint64_t token) {
  {
    ps::MutexLock lock(&mu_);
    // Drops messages of a lost predecessor, and messages that others have overtaken.
    if (over_.count(instance) > 0 || (instance == backup_instance_ && token <= newest_token_))
      return;
    if (instance != backup_instance_) over_.insert(std::exchange(backup_instance_, instance));
    newest_token_ = token;
    if (token_ != 0) user_->OnBackup(0);  // drops messages that nobody will answer
    token_ = token;
    threads_told_ = 0;
    fetches_ = !has_state_;
  }
  if (has_state_) return BeginTelling(token);
  Send(kFetch, backup(), 0, token, "", {});
}

void BackupLink::BeginTelling(uint64_t token) {
  CopyRecord record;
  record.token = token;
  record.what = CopyRecord::kBegin;
  ps::MutexLock lock(&mu_);
  begun_ = NewNumber(token);
  const uint64_t number = begun_;
  lock.Unlock();
  // Messages may overtake each other, so the next one waits for the answer to this one.
  Send(kCopy, backup(), 0, number, record.Pack(), {});
}

// ------------------------------------------------------------------ work as the primary

uint64_t BackupLink::Tell(uint64_t key, const CopyRecord& record, SharedBytes values) {
  uint64_t number = 0;
  {
    ps::MutexLock lock(&mu_);
    number = NewNumber(record.token);
  }
  Send(kCopy, backup(), key, number, record.Pack(), std::move(values));
  return number;
}

void BackupLink::OnToldAll(uint64_t token) {
  {
    ps::MutexLock lock(&mu_);
    if (token != token_ || ++threads_told_ != num_threads_) return;
  }
  PS_PROBE(kBackupWhole);
  CopyRecord record;
  record.token = token;
  record.what = CopyRecord::kComplete;
  Tell(0, record, {});
  BPS_LOG(INFO) << channel_->NameOfServer(backup()) << " has a copy of this server's state";
}

bool BackupLink::IsCopied() {
  ps::MutexLock lock(&mu_);
  return token_ != 0 && threads_told_ >= num_threads_;
}

std::string BackupLink::fetch_error() {
  ps::MutexLock lock(&mu_);
  return fetch_error_;
}

uint64_t BackupLink::fetched_token() {
  ps::MutexLock lock(&mu_);
  return fetched_token_;
}

void BackupLink::OnFetchAnswer(const Message& message) {
  uint64_t token = 0;
  bool is_empty = false;
  {
    ps::MutexLock lock(&mu_);
    if (message.number != token_ || !std::exchange(fetches_, false)) return;
    is_empty = fetched_.Keys().empty();
    if (message.failed) {
      fetch_error_ = message.body;
    } else {
      token = fetched_token_ = token_;
    }
    if (!is_empty) has_state_ = true;
    user_->OnBackup(token);
  }
  awaits_ = false;
  user_->OnFetched();
}

// ------------------------------------------------------------------ work as the backup

void BackupLink::OnFetch(const Message& message) {
  std::string error;
  {
    ps::MutexLock lock(&mu_);
    if (message.number != last_token_) return;  // a newer token was given meanwhile
    if (!is_whole_) {
      error = "server " + std::to_string(message.peer) +
              " was lost before its whole state had been copied to " +
              channel_->NameOfServer(channel_->rank()) + ": load the last checkpoint";
    } else {
      PS_PROBE(kStateFetched);
      sending_ = Sending{message, last_token_, {}, 0};
      for (const uint64_t key : copies_.Keys()) sending_->keys.push_back(key);
    }
  }
  error.empty() ? SendFetched() : Answer(message, error);
}

void BackupLink::SendFetched() {
  std::deque<uint64_t> keys;
  uint64_t token = 0;
  std::optional<Message> done;
  {
    ps::MutexLock lock(&mu_);
    if (!sending_) return;
    token = sending_->token;
    while (sending_->open < kSentAtOnce && !sending_->keys.empty()) {
      keys.push_back(sending_->keys.front());
      sending_->keys.pop_front();
      ++sending_->open;
    }
    if (sending_->open == 0) {
      done = sending_->request;
      sending_.reset();
    }
  }
  for (const uint64_t key : keys) {
    user_->InThreadOf(key, [this, key, token] { SendFetched(key, token); });
  }
  if (done) Answer(*done, "");
}

void BackupLink::SendFetched(uint64_t key, uint64_t token) {
  {
    ps::MutexLock lock(&mu_);
    if (token != last_token_) return;  // the primary was lost again
    const bool is_sending = sending_ && sending_->token == token;
    // The tensor may have been freed since. If all copies were cleared, RecordOf throws.
    if (is_sending && is_whole_ && !copies_.Has(key)) {
      --sending_->open;
      lock.Unlock();
      return SendFetched();
    }
  }
  try {
    SharedBytes values;
    const CopyRecord record = copies_.RecordOf(key, &values);
    Send(kFetched, primary(), key, token, record.Pack(), std::move(values));
  } catch (const std::exception& e) {
    Message request;
    {
      ps::MutexLock lock(&mu_);
      if (!sending_ || sending_->token != token) return;
      request = sending_->request;
      sending_.reset();
    }
    Answer(request, "the copy of its state cannot be sent: " + std::string(e.what()));
  }
}

// ------------------------------------------------------------------ messages

bool BackupLink::Expects(const MessageHead& head) const {
  if (!is_on_ || !head.is_request) return false;
  return (head.op == kCopy && head.peer == primary()) ||
         (head.op == kFetched && head.peer == backup());
}

void BackupLink::OnMessage(Message* message) {
  if (!is_on_ || (message->peer != backup() && message->peer != primary())) return;
  if (!message->is_request) return OnAnswer(*message);
  switch (message->op) {
    case kMeet:
      return OnMeet(*message);
    case kFetch:
      if (message->peer == primary()) OnFetch(*message);
      return;
    case kFetched:
    case kCopy:
      return OnRecord(message);
    default:
      return Answer(*message, "a server does not know operation " + std::to_string(message->op) +
                                  ": install the same byteps on every node");
  }
}

void BackupLink::OnRecord(Message* message) {
  CopyRecord record;
  if (!CopyRecord::Unpack(message->body, &record)) {
    return Answer(*message, "a record of a copy does not parse");
  }
  const bool is_copy = message->op == kCopy;
  Copies* const copies = is_copy ? &copies_ : &fetched_;
  uint64_t resets = 0;
  {
    ps::MutexLock lock(&mu_);
    const bool counts = is_copy
                            ? message->peer == primary() && record.token == last_token_
                            : message->peer == backup() && fetches_ && message->number == token_;
    if (!counts) return PS_PROBE(kLateRecord);
    if (is_copy && record.what == CopyRecord::kBegin) {
      copies_.Clear();
      is_whole_ = lacks_record_ = false;
    }
    if (is_copy && record.what == CopyRecord::kComplete) is_whole_ = !lacks_record_;
    resets = copies->resets();
  }
  if (record.what == CopyRecord::kBegin || record.what == CopyRecord::kComplete) {
    return Answer(*message, "");
  }
  user_->InThreadOf(message->key, [this, record, copies, resets, message = *message] {
    Apply(message, record, copies, resets);
  });
}

void BackupLink::Apply(const Message& message, const CopyRecord& record, Copies* copies,
                       uint64_t resets) {
  std::string error;
  try {
    // The values were dropped for lack of memory.
    if (message.values.empty() && message.sent_bytes > 0) throw std::bad_alloc();
    error = copies->Apply(message.key, record, message.values, resets);
  } catch (const std::bad_alloc&) {
    error = channel_->NameOfServer(channel_->rank()) + " has no memory for it";
  }
  bool is_over = false;
  if (!error.empty()) {
    ps::MutexLock lock(&mu_);
    if (message.op == kCopy) {
      if (record.token == last_token_) {
        is_whole_ = false;
        lacks_record_ = true;
      }
    } else if (std::exchange(fetches_, false)) {
      fetch_error_ = error;
      awaits_ = false;
      is_over = true;
    }
  }
  Answer(message, error);
  if (is_over) user_->OnFetched();
}

void BackupLink::OnAnswer(const Message& message) {
  switch (message.op) {
    case kFetch:
      if (message.peer == backup()) OnFetchAnswer(message);
      return;
    case kFetched: {
      {
        ps::MutexLock lock(&mu_);
        if (!sending_ || sending_->token != message.number) return;
        --sending_->open;
      }
      return SendFetched();
    }
    default:
      break;
  }
  if (message.peer != backup()) return;
  {
    ps::MutexLock lock(&mu_);
    if (message.number == begun_ && !message.failed && token_ != 0) return user_->OnBackup(token_);
  }
  if (message.failed) {
    {
      ps::MutexLock lock(&mu_);
      if (token_ != message.number >> 32) return;
      token_ = 0;
      user_->OnBackup(0);
    }
    BPS_LOG(WARNING) << channel_->NameOfServer(message.peer)
                     << " has no copy of this server's state any more: " << message.body
                     << "; if this server is lost, so is the job";
  }
  user_->OnCopied(message.key, message.number);
}

void BackupLink::Send(int op, int peer, uint64_t key, uint64_t number, std::string body,
                      SharedBytes values) {
  Message message = MakeRequest(op, peer, key, number, std::move(body));
  message.between_servers = true;
  if (!values.empty()) message.SetValues(std::move(values));
  channel_->Send(message);
}

void BackupLink::Answer(const Message& request, const std::string& error) {
  Message message = MakeAnswer(request.op, request.peer, request.key, request.number, error);
  message.between_servers = true;
  channel_->Send(message);
}

}  // namespace core
}  // namespace byteps
