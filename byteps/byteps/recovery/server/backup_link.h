// BackupLink: how servers copy the state that they keep for an optimizer
// (docs/design/losses.md).
#ifndef BYTEPS_RECOVERY_SERVER_BACKUP_LINK_H_
#define BYTEPS_RECOVERY_SERVER_BACKUP_LINK_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <set>
#include <string>

#include "byteps/base/mutex.h"
#include "byteps/base/shared_bytes.h"
#include "byteps/cluster/channel.h"
#include "byteps/observe/metrics.h"
#include "byteps/recovery/server/copies.h"
#include "byteps/recovery/server/copy_record.h"

namespace byteps {
namespace core {

// What this server and its neighbors say to each other, so that another server has a copy of the
// state that each keeps for an optimizer (docs/design/losses.md).
//
//   primary                                backup
//     MEET  <---------------------------->  MEET (pass)   who connected is the first
//     FETCH  ---------------------------->                a server that has no state
//           <----------------------------  FETCHED ...    that of its predecessor
//     COPY (kBegin), of all, (kComplete) ->               a server that has state; each, when
//                                                         the one before was answered
//     COPY (a round, a step, a load) ----->               then, before a member is answered
//
// MEET has a u64, the life of the sender; two u64, the pass of the receiver and the life that it
// was given to, if the sender is its backup; and a u8 of flags.  FETCHED and COPY have a
// CopyRecord.  All are answered but MEET, as requests of workers are.
//
// A server is the primary of one neighbor and the backup of another, which are the same where there
// are two servers.
//
// Late messages.  A server that is lost may still send, and be answered.  A backup gives each that
// comes a pass, and takes records of the newest one alone; and requests have numbers that no
// earlier server's had.

// The server, as its link calls it: from any thread, and but for OnBackup with no lock held.
class BackupUser {
 public:
  virtual ~BackupUser() = default;
  // Does this in the thread of a key, behind what it was given before.
  virtual void InThreadOf(uint64_t key, std::function<void()> task) = 0;
  // The backup has what it was told of this key by the request of this number, or has no copy any
  // more.
  virtual void OnCopied(uint64_t key, uint64_t number) = 0;
  // The backup is told with this pass from now on, and has nothing yet; 0: there is none.  The
  // link's lock is held, so that calls come in the order of what it learns: this must not call it.
  virtual void OnBackup(uint64_t pass) = 0;
  // All state has come that will come.
  virtual void OnFetched() = 0;
};

// Any thread may call anything.
class BackupLink {
 public:
  // `user` and `channel` outlive this.
  BackupLink(bool is_on, int num_servers, size_t num_threads, Channel* channel, BackupUser* user);

  // Whether servers have copies.
  bool is_on() const { return is_on_; }
  int num_servers() const { return num_servers_; }
  // This server has joined.
  void Start();
  // Another server is lost, or another one has its place.
  void OnServerLost(int rank);
  void OnServerReplaced(int rank);
  // A message of another server's.
  void OnMessage(Message* message);
  // Whether such a message may have values.
  bool Expects(const MessageHead& head) const;

  // ----- as a primary

  // A member was answered that its state was loaded: this server will not ask for any.
  void HasState() { has_state_ = true; }
  // Returns the number of the request.
  uint64_t Tell(uint64_t key, const CopyRecord& record, SharedBytes values);
  // All of a thread's state was told with this pass.
  void OnToldAll(uint64_t pass);
  // Whether the backup has been told all.
  bool IsCopied();
  // Whether it is not known yet whether there is state of a predecessor's, or it is still coming.
  bool Fetches() const { return is_on_ && awaits_; }
  // Why it will not come; or "".
  std::string fetch_error();
  // That state, with this pass.
  Copies* fetched() { return &fetched_; }
  uint64_t fetched_pass();

 private:
  // The server that has this one's copy, and the one whose copy it has.
  int backup() const { return (channel_->rank() + 1) % num_servers_; }
  int primary() const { return (channel_->rank() + num_servers_ - 1) % num_servers_; }

  void Meet(int peer, uint8_t flags);
  void OnMeet(const Message& message);
  void OnPass(uint64_t life, uint64_t pass);
  void BeginTelling(uint64_t pass);
  void OnFetch(const Message& message);
  void SendFetched();
  void SendFetched(uint64_t key, uint64_t pass);
  void OnRecord(Message* message);
  void Apply(const Message& message, const CopyRecord& record, Copies* copies, uint64_t generation);
  void OnAnswer(const Message& message);
  uint64_t NewNumber(uint64_t pass) PS_REQUIRES(mu_) {
    return pass << 32 | (++last_number_ & UINT32_MAX);
  }
  void OnFetchAnswer(const Message& message);
  void Send(int op, int peer, uint64_t key, uint64_t number, std::string body, SharedBytes values);
  void Answer(const Message& request, const std::string& error);

  const bool is_on_;
  const int num_servers_;
  const size_t num_threads_;
  Channel* const channel_;
  BackupUser* const user_;
  const uint64_t life_;
  Copies copies_;   // of the primary's state
  Copies fetched_;  // of this server's own, as its predecessor had it
  std::atomic<bool> has_state_{false};
  std::atomic<bool> awaits_{true};  // see Fetches

  ps::Mutex mu_;
  uint64_t last_number_ PS_GUARDED_BY(mu_) = 0;
  // Towards the backup.
  uint64_t pass_ PS_GUARDED_BY(mu_) = 0;  // 0: it is lost, or was not met
  uint64_t backup_life_ PS_GUARDED_BY(mu_) = 0;
  uint64_t newest_pass_ PS_GUARDED_BY(mu_) = 0;  // of that life
  std::set<uint64_t> over_ PS_GUARDED_BY(mu_);   // lives before that one
  bool fetches_ PS_GUARDED_BY(mu_) = false;
  uint64_t fetched_pass_ PS_GUARDED_BY(mu_) = 0;
  std::string fetch_error_ PS_GUARDED_BY(mu_);
  uint64_t begun_ PS_GUARDED_BY(mu_) = 0;  // the request that says kBegin
  size_t threads_told_ PS_GUARDED_BY(mu_) = 0;
  // Towards the primary.
  uint64_t last_pass_ PS_GUARDED_BY(mu_) = 0;
  uint64_t life_with_pass_ PS_GUARDED_BY(mu_) = 0;
  bool is_whole_ PS_GUARDED_BY(mu_) = true;
  // A record could not be applied: the copy is not whole until the primary tells all of it anew.
  bool lacks_record_ PS_GUARDED_BY(mu_) = false;
  struct Sending {
    Message request;  // its FETCH
    uint64_t pass = 0;
    std::deque<uint64_t> keys;
    size_t open = 0;
  };
  std::optional<Sending> sending_ PS_GUARDED_BY(mu_);
};

}  // namespace core
}  // namespace byteps

#endif  // BYTEPS_RECOVERY_SERVER_BACKUP_LINK_H_
