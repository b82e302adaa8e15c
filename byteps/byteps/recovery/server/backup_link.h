// BackupLink: copies of the servers' optimizer state on other servers (docs/design/losses.md).
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

// Messages between neighboring servers, by which another server keeps a copy of each server's
// optimizer state (docs/design/losses.md).
//
//   primary                                backup
//     MEET  <---------------------------->  MEET (token)  the server that connected sends first
//     FETCH  ---------------------------->                a server without state
//           <----------------------------  FETCHED ...    the state of its predecessor
//     COPY (kBegin), everything, (kComplete) ->           a server with state; each message after
//                                                         the answer to the last
//     COPY (a round, a step, a load) ----->               later, before a member is answered
//
// An instance is a random number of a server's process. MEET has: a u64, the sender's instance; two
// u64, the receiver's token and the instance to which it was given, if the sender is its backup;
// and a u8 of flags. FETCHED and COPY have a CopyRecord. All but MEET are answered like requests of
// workers.
//
// A server is the primary of one neighbor and the backup of the other neighbor. With two servers,
// both neighbors are the same server.
//
// Late messages: a server that was declared lost may still send, and may get answers. So a backup
// gives each instance of its primary a fencing token, and accepts only records with the newest
// token. No two servers use the same request numbers.

// Callbacks of the link. Called by any thread, with no lock held except for OnBackup.
class BackupUser {
 public:
  virtual ~BackupUser() = default;
  // Runs `task` in the thread of a key, after earlier tasks.
  virtual void InThreadOf(uint64_t key, std::function<void()> task) = 0;
  // Called when the backup has applied request `number` about this key, or no longer has a copy.
  virtual void OnCopied(uint64_t key, uint64_t number) = 0;
  // Called when records must go to a new backup, which has no state yet. `token`: its token; 0:
  // there is no backup. Called with the link's lock held, so that calls are in order. Must not call
  // the link.
  virtual void OnBackup(uint64_t token) = 0;
  // Called when the predecessor's state has arrived, or will not arrive.
  virtual void OnFetched() = 0;
};

// Thread-safe.
class BackupLink {
 public:
  // `user` and `channel` outlive this object.
  BackupLink(bool is_on, int num_servers, size_t num_threads, Channel* channel, BackupUser* user);

  // Returns whether servers hold copies of each other's state.
  bool is_on() const { return is_on_; }
  int num_servers() const { return num_servers_; }
  // Starts the link when this server has joined.
  void Start();
  // OnServerLost and OnServerReplaced handle the loss or the replacement of another server.
  void OnServerLost(int rank);
  void OnServerReplaced(int rank);
  // Handles a message from another server.
  void OnMessage(Message* message);
  // Returns whether a message with this head may have values.
  bool Expects(const MessageHead& head) const;

  // ----- work as the primary

  // Makes this server fetch no state, because a member was told that its own state is loaded.
  void HasState() { has_state_ = true; }
  // Sends a record to the backup. Returns the number of the request.
  uint64_t Tell(uint64_t key, const CopyRecord& record, SharedBytes values);
  // Records that a thread has sent all its state with this token.
  void OnToldAll(uint64_t token);
  // Returns whether the backup has the whole state.
  bool IsCopied();
  // Returns whether a predecessor's state may still arrive.
  bool Fetches() const { return is_on_ && awaits_; }
  // Returns the reason why the predecessor's state will not arrive, or "".
  std::string fetch_error();
  // Return the copies of the predecessor's state, and their token.
  Copies* fetched() { return &fetched_; }
  uint64_t fetched_token();

 private:
  // backup() and primary() return the ranks of this server's backup, and of the server whose backup
  // this server is.
  int backup() const { return (channel_->rank() + 1) % num_servers_; }
  int primary() const { return (channel_->rank() + num_servers_ - 1) % num_servers_; }

  void Meet(int peer, uint8_t flags);
  void OnMeet(const Message& message);
  void OnToken(uint64_t instance, uint64_t token);
  void BeginTelling(uint64_t token);
  void OnFetch(const Message& message);
  void SendFetched();
  void SendFetched(uint64_t key, uint64_t token);
  void OnRecord(Message* message);
  void Apply(const Message& message, const CopyRecord& record, Copies* copies, uint64_t resets);
  void OnAnswer(const Message& message);
  uint64_t NewNumber(uint64_t token) PS_REQUIRES(mu_) {
    return token << 32 | (++last_number_ & UINT32_MAX);
  }
  void OnFetchAnswer(const Message& message);
  void Send(int op, int peer, uint64_t key, uint64_t number, std::string body, SharedBytes values);
  void Answer(const Message& request, const std::string& error);

  const bool is_on_;
  const int num_servers_;
  const size_t num_threads_;
  Channel* const channel_;
  BackupUser* const user_;
  const uint64_t instance_;
  Copies copies_;   // copies of the primary's state
  Copies fetched_;  // predecessor's state of this server
  std::atomic<bool> has_state_{false};
  std::atomic<bool> awaits_{true};  // see Fetches

  ps::Mutex mu_;
  uint64_t last_number_ PS_GUARDED_BY(mu_) = 0;
  // State as primary.
  uint64_t token_ PS_GUARDED_BY(mu_) = 0;  // 0: the backup is lost, or was not met yet
  uint64_t backup_instance_ PS_GUARDED_BY(mu_) = 0;
  uint64_t newest_token_ PS_GUARDED_BY(mu_) = 0;  // newest token that backup_instance_ has given
  std::set<uint64_t> over_ PS_GUARDED_BY(mu_);    // earlier instances of the backup
  bool fetches_ PS_GUARDED_BY(mu_) = false;
  uint64_t fetched_token_ PS_GUARDED_BY(mu_) = 0;
  std::string fetch_error_ PS_GUARDED_BY(mu_);
  uint64_t begun_ PS_GUARDED_BY(mu_) = 0;  // number of the kBegin request
  size_t threads_told_ PS_GUARDED_BY(mu_) = 0;
  // State as backup.
  uint64_t last_token_ PS_GUARDED_BY(mu_) = 0;
  uint64_t instance_with_token_ PS_GUARDED_BY(mu_) = 0;
  bool is_whole_ PS_GUARDED_BY(mu_) = true;
  // Whether a record could not be applied, so that the copy is incomplete until the primary sends
  // everything again.
  bool lacks_record_ PS_GUARDED_BY(mu_) = false;
  struct Sending {
    Message request;  // the FETCH request
    uint64_t token = 0;
    std::deque<uint64_t> keys;
    size_t open = 0;
  };
  std::optional<Sending> sending_ PS_GUARDED_BY(mu_);
};

}  // namespace core
}  // namespace byteps

#endif  // BYTEPS_RECOVERY_SERVER_BACKUP_LINK_H_
