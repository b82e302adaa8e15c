// A class with a lock that clang's -Wthread-safety must accept, and with MISTAKES must refuse.
#include "byteps/base/mutex.h"

class Counter {
 public:
  void Add() {
    ps::MutexLock lock(&mu_);
    AddHere();
    cond_.NotifyAll();
  }

  void AwaitSome() {
    ps::MutexLock lock(&mu_);
    cond_.Wait(&mu_, [this]() PS_REQUIRES(mu_) { return count_ > 0; });
  }

  bool AddIfFree() {
    if (!mu_.TryLock()) return false;
    ++count_;
    mu_.Unlock();
    return true;
  }

  void AddTwice() {
    ps::MutexLock lock(&mu_);
    ++count_;
    lock.Unlock();
    lock.Lock();
    ++count_;
  }

  int Shared() {
    ps::ReaderLock lock(&shared_mu_);
    return shared_;
  }

  void SetShared(int value) {
    ps::WriterLock lock(&shared_mu_);
    shared_ = value;
  }

#ifdef MISTAKES
  int Read() { return count_; }

  void Write() {
    ps::MutexLock lock(&mu_);
    lock.Unlock();
    ++count_;
  }

  void Call() { AddHere(); }

  void Await() {
    ps::MutexLock lock(&mu_);
    cond_.Wait(&mu_, [this] { return count_ > 0; });
  }

  void Forget() {
    mu_.Lock();
    ++count_;
  }

  void WriteAsReader() {
    ps::ReaderLock lock(&shared_mu_);
    ++shared_;
  }

  void AwaitWithout() {
    cond_.Wait(&mu_, [this]() PS_REQUIRES(mu_) { return count_ > 0; });
  }
#endif

 private:
  void AddHere() PS_REQUIRES(mu_) { ++count_; }

  ps::Mutex mu_;
  ps::CondVar cond_;
  int count_ PS_GUARDED_BY(mu_) = 0;
  ps::SharedMutex shared_mu_;
  int shared_ PS_GUARDED_BY(shared_mu_) = 0;
};

int main() {
  Counter counter;
  counter.Add();
  counter.AwaitSome();
  counter.AddTwice();
  counter.SetShared(3);
  return counter.AddIfFree() && counter.Shared() == 3 ? 0 : 1;
}
