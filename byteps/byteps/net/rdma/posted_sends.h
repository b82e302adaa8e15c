#ifndef BYTEPS_NET_RDMA_POSTED_SENDS_H_
#define BYTEPS_NET_RDMA_POSTED_SENDS_H_

#include <cstdint>
#include <vector>

namespace ps {
namespace rdma {

// Requests in a send queue, and the choice of which are signalled. A signalled request asks the
// device for a completion.
//
// Handling a completion costs more than a small message, so most requests are not signalled. A
// queue completes requests in order, so a completion covers all requests before it. The following
// are signalled:
// - one of every 16 requests (or of a quarter of the queue, if that is fewer), so that a full queue
//   always has one;
// - the write that fills half of a window, so that more can be written meanwhile; and the end of a
//   large value, because a thread waits for its memory;
// - the end of a message if nothing else would show its arrival, because no signalled request is in
//   flight, and the queue is not watched;
// - every request, after SignalAll.
//
// So the last messages before a pause may be unsignalled. After each completion of a message, the
// polling thread therefore watches the queue for a moment (Watch). In that moment no message is
// signalled only to show its arrival. Then the thread posts a signalled request without effect, if
// one is needed (EndWatch). A stopped queue ends with such a request, too, because a device does
// not report completed requests that are unsignalled.
//
// This class calls no device, so tests need none. Not thread-safe: the endpoint locks it.
class PostedSends {
 public:
  struct Request {
    uint8_t type = 0;    // a FrameType; 0: a write
    uint64_t key = 0;    // key of the message
    uint32_t bytes = 0;  // bytes of a write
    // Whether its completion means that the log's next message has arrived.
    bool ends_message = false;
    // Whether it belongs to a large message, whose memory should be freed soon.
    bool is_large = false;
  };

  // Effect of a completion.
  struct Retired {
    uint64_t messages = 0;  // messages that ended with the completed requests
    Request last;           // request whose completion this is
  };

  // Number of slots beyond `depth` that the queue has for the request without effect.
  static constexpr uint32_t kReserved = 1;

  // `depth`: number of requests that fit in the queue. `window_bytes`: limit of the bytes of writes
  // in flight.
  PostedSends(uint32_t depth, uint64_t window_bytes);

  // ----- posting

  bool has_room() const { return in_queue() < depth_; }
  // Number of the next request, counted from 1.
  uint64_t next() const { return last_ + 1; }
  // Slot for the frame of the next request, from 0 to `depth` - 1.
  uint32_t next_slot() const { return static_cast<uint32_t>(next() % depth_); }
  // Returns whether the request must be signalled.
  bool MustSignal(const Request& request) const;
  // Adds a request that the device has taken.
  void Add(const Request& request, bool signalled);
  // Makes every request from now on signalled.
  void SignalAll() { signals_all_ = true; }

  // ----- completions

  // Removes the request of this number, and all requests before it, because they are complete.
  // Returns false if there is no request of this number.
  bool Retire(uint64_t number, Retired* retired);

  // Returns whether to call EndWatch soon. Call after completions were handled.
  bool Watch();
  // Returns whether messages were sent whose arrival no request in the queue will show.
  bool EndWatch();
  // Returns whether no completion will cover the last request.
  bool ends_unsignalled() const { return last_ > retired_ && last_ > last_signalled_; }

  bool empty() const { return last_ == retired_; }
  // Number of bytes of incomplete writes.
  uint64_t bytes() const { return bytes_; }

 private:
  // Requests after the last signalled one.
  struct Unheard {
    uint32_t requests = 0;
    uint64_t messages = 0;
    uint64_t bytes = 0;
  };

  uint64_t in_queue() const { return last_ - retired_; }
  bool signalled_is_in_flight() const { return last_signalled_ > retired_; }
  bool any_unheard() const { return unheard_.messages > 0 && !signalled_is_in_flight(); }

  const uint32_t depth_;
  const uint32_t every_;           // one of this many requests is signalled
  const uint64_t unheard_bytes_;   // limit of bytes not covered by a signalled request
  std::vector<Request> requests_;  // by number, modulo the size
  uint64_t last_ = 0;
  uint64_t last_signalled_ = 0;
  uint64_t retired_ = 0;
  uint64_t bytes_ = 0;
  Unheard unheard_;
  bool signals_all_ = false;
  bool heard_ = false;  // whether a message has arrived since the last Watch
  bool watched_ = false;
};

}  // namespace rdma
}  // namespace ps
#endif  // BYTEPS_NET_RDMA_POSTED_SENDS_H_
