#ifndef BYTEPS_NET_RDMA_POSTED_SENDS_H_
#define BYTEPS_NET_RDMA_POSTED_SENDS_H_

#include <cstdint>
#include <vector>

namespace ps {
namespace rdma {

// The requests in a send queue, and which of them the device tells of.
//
// A completion costs the polling thread more than a small message does, so most requests ask for
// none.  Requests of a queue complete in the order in which they were posted: a completion tells of
// its request and of all before it.  Signalled, which means that they ask for one, are
// - one of 16, or of a quarter of the queue's depth: a full queue always has a signalled request;
// - a write with which half of a window was posted, so that more can be written while the rest
//   is in flight,
//   and the end of a large value, whose memory somebody waits for;
// - the end of a message when nothing else would tell that it has arrived: no signalled request is
//   in flight, and the queue is not watched;
// - all, once SignalAll was called.
//
// The last messages before a pause may thus be unsignalled.  So the polling thread, once it has
// heard of a message, watches the queue for a moment (Watch), in which others need not be
// signalled; then it posts a signalled request that does nothing where that is needed (EndWatch).
// The same ends a queue pair that was stopped: a device need not tell of unsignalled requests that
// it had done before.
//
// It knows no device, so that it runs in a test without one.
//
// Locked by its owner.
class PostedSends {
 public:
  struct Request {
    uint8_t type = 0;           // a FrameType; 0: a write
    uint64_t key = 0;           // of the message
    uint32_t bytes = 0;         // of a write
    bool ends_message = false;  // the next in the log has arrived with it
    bool is_large = false;      // the message, so that its memory is let go of at once
  };

  // What is over with a completion.
  struct Retired {
    uint64_t messages = 0;  // that ended with these requests
    Request last;           // the request of the completion
  };

  // Requests that the queue must hold in addition to `depth`: that which does nothing.
  static constexpr uint32_t kReserved = 1;

  // `window_bytes`: that are written at a time.
  PostedSends(uint32_t depth, uint64_t window_bytes);

  // ----- posting

  bool has_room() const { return in_queue() < depth_; }
  // The number of the next request; they count from 1.
  uint64_t next() const { return last_ + 1; }
  // Memory of its own, until it is over: one of `depth` slots.
  uint32_t next_slot() const { return static_cast<uint32_t>(next() % depth_); }
  // Whether it must be signalled.
  bool MustSignal(const Request& request) const;
  // The device has it.
  void Add(const Request& request, bool signalled);
  // From now on every request is signalled.
  void SignalAll() { signals_all_ = true; }

  // ----- completions

  // The request of this number is over, and so are all before it.  False: there is none.
  bool Retire(uint64_t number, Retired* retired);

  // Whenever completions have been handled.  Whether EndWatch must be called soon.
  bool Watch();
  // Whether messages were sent of whose arrival nothing in the queue will tell.
  bool EndWatch();
  // Whether no completion will tell that the last request is over.
  bool ends_unsignalled() const { return last_ > retired_ && last_ > last_signalled_; }

  bool empty() const { return last_ == retired_; }
  // Of writes that are not known to be over.
  uint64_t bytes() const { return bytes_; }

 private:
  // Of the requests behind the last signalled one.
  struct Unheard {
    uint32_t requests = 0;
    uint64_t messages = 0;
    uint64_t bytes = 0;
  };

  uint64_t in_queue() const { return last_ - retired_; }
  bool signalled_is_in_flight() const { return last_signalled_ > retired_; }
  bool any_unheard() const { return unheard_.messages > 0 && !signalled_is_in_flight(); }

  const uint32_t depth_;
  const uint32_t every_;           // of so many requests one is signalled
  const uint64_t unheard_bytes_;   // fewer are
  std::vector<Request> requests_;  // by number, modulo its size
  uint64_t last_ = 0;
  uint64_t last_signalled_ = 0;
  uint64_t retired_ = 0;
  uint64_t bytes_ = 0;
  Unheard unheard_;
  bool signals_all_ = false;
  bool heard_ = false;  // of messages, since the last Watch
  bool watched_ = false;
};

}  // namespace rdma
}  // namespace ps
#endif  // BYTEPS_NET_RDMA_POSTED_SENDS_H_
