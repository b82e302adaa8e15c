# Test programs for the worker and the server; built with BYTEPS_BUILD_TESTS.
add_library(worker_objects OBJECT ${WORKER_SOURCES} byteps/device/fake.cc)
target_compile_options(worker_objects PRIVATE ${WARNINGS})
target_link_libraries(worker_objects PUBLIC byteps_engine)
add_library(worker_under_test STATIC ${WORKER_RECOVERY_SOURCES})
target_compile_options(worker_under_test PRIVATE ${WARNINGS})
target_link_libraries(worker_under_test PUBLIC worker_objects)

# Linking this proves that a worker needs nothing of recovery/.
add_library(worker_without_recovery MODULE $<TARGET_OBJECTS:worker_objects>)
target_link_libraries(worker_without_recovery PRIVATE byteps_engine)
target_link_options(worker_without_recovery PRIVATE LINKER:-z,defs)

# Upstream's arrays call memcpy with null and 0 bytes when they grow.
set(ARRAYS_THAT_GROW)
if(BYTEPS_FUZZERS)
  set(ARRAYS_THAT_GROW -fno-sanitize=nonnull-attribute)
endif()

find_package(GTest)
if(GTest_FOUND)
  # Linking this proves that a server needs nothing of recovery/; running it, that it sums.
  add_library(server_test_objects OBJECT tests/server/server_test.cc)
  target_compile_options(server_test_objects PRIVATE ${WARNINGS})
  target_link_libraries(server_test_objects PUBLIC byteps_engine GTest::gtest)
  add_executable(server_without_recovery $<TARGET_OBJECTS:server_test_objects>)
  target_link_libraries(server_without_recovery PRIVATE byteps_engine GTest::gtest_main)
  add_executable(unit_test
    $<TARGET_OBJECTS:server_test_objects>
    tests/base/invariant_test.cc
    tests/base/protocol_test.cc
    tests/cluster/early_messages_test.cc
    tests/cluster/ps_message_test.cc
    tests/cluster/session_test.cc
    tests/device/device_test.cc
    tests/engine/engine_gpu_test.cc
    tests/engine/engine_test.cc
    tests/engine/failure_test.cc
    tests/engine/push_scheduler_test.cc
    tests/engine/remains_test.cc
    tests/engine/streamed_sum_test.cc
    tests/net/link/dial_plan_test.cc
    tests/net/link/link_test.cc
    tests/net/link/name_service_test.cc
    tests/net/link/nics_test.cc
    tests/net/link/peer_table_test.cc
    tests/net/link/rdma_choice_test.cc
    tests/net/membership/node_membership_test.cc
    tests/net/membership/node_return_test.cc
    tests/net/membership/parts_test.cc
    tests/net/membership/scheduler_membership_test.cc
    tests/net/rdma/outbox_test.cc
    tests/net/net_settings_test.cc
    tests/net/rdma/posted_sends_test.cc
    tests/net/rdma/wire_test.cc
    tests/net/tcp/greeter_test.cc
    tests/net/tcp/poller_test.cc
    tests/net/tcp/stream_test.cc
    tests/observe/status_test.cc
    tests/program/stop_order_test.cc
    tests/recovery/scheduler/held_failure_test.cc
    tests/recovery/scheduler/replicas_test.cc
    tests/recovery/scheduler/scheduler_return_test.cc
    tests/recovery/scheduler/server_places_test.cc
    tests/recovery/scheduler/trials_test.cc
    tests/recovery/server/absent_members_test.cc
    tests/recovery/server/backup_link_test.cc
    tests/recovery/server/confirmations_test.cc
    tests/recovery/server/copied_rounds_test.cc
    tests/recovery/server/given_sums_test.cc
    tests/recovery/worker/kept_sums_test.cc
    tests/server/accumulator_test.cc
    tests/server/feedback_test.cc
    tests/server/optimizer/differences_test.cc
    tests/server/optimizer/step_test.cc
    tests/server/memory_test.cc
    tests/server/release_test.cc
    tests/support/job.cc)
  target_compile_options(unit_test PRIVATE ${WARNINGS} ${ARRAYS_THAT_GROW})
  target_link_libraries(unit_test PRIVATE
    worker_under_test server_recovery scheduler_recovery GTest::gtest_main)
  add_dependencies(unit_test worker_without_recovery server_without_recovery)
  target_link_options(unit_test PRIVATE  # for NoMemoryFrom in support/job.cc
    LINKER:--wrap=_Znwm,--wrap=_Znam,--wrap=_ZnamRKSt9nothrow_t)
  # Running this proves that a scheduler needs nothing of recovery/.
  add_executable(scheduler_without_recovery tests/net/membership/scheduler_membership_test.cc)
  target_compile_options(scheduler_without_recovery PRIVATE ${WARNINGS} ${ARRAYS_THAT_GROW})
  target_link_libraries(scheduler_without_recovery PRIVATE byteps_net GTest::gtest_main)
  add_executable(connection_test
    tests/net/link/contract/contract_test.cc
    tests/net/tcp/connection/connection_test.cc
    tests/net/tcp/connection/link.cc)
  target_include_directories(connection_test PRIVATE tests/net/link/contract)
  target_compile_options(connection_test PRIVATE ${WARNINGS} ${ARRAYS_THAT_GROW})
  target_link_libraries(connection_test PRIVATE byteps_net GTest::gtest_main)
  add_executable(tls_test tests/net/tls/tls_test.cc)
  target_compile_options(tls_test PRIVATE ${WARNINGS})
  target_link_libraries(tls_test PRIVATE byteps_net GTest::gtest_main)
endif()

add_executable(sum_worker tests/jobs/sum_worker.cc)
target_compile_options(sum_worker PRIVATE ${WARNINGS})
target_link_libraries(sum_worker PRIVATE worker_under_test)

# The simulation has its own threads and clock, which sanitizers cannot follow.
if(NOT BYTEPS_SANITIZE)
  add_executable(simulate
    tests/simulation/worker_script.cc
    tests/simulation/simulated_gpu.cc  # replaces fake.cc
    tests/simulation/each_wait.cc
    tests/simulation/job.cc
    tests/simulation/job_faults.cc
    tests/simulation/network.cc
    tests/simulation/plan.cc
    tests/simulation/simulate.cc
    tests/simulation/replica_job.cc
    tests/simulation/replica_member.cc
    tests/simulation/simulated_channel.cc
    tests/simulation/virtual_threads.cc)
  target_compile_options(simulate PRIVATE ${WARNINGS})
  target_link_libraries(simulate PRIVATE worker_under_test server_recovery scheduler_recovery)
endif()

# Fuzzers of everything that reads bytes from a network, a program per parser (tests/fuzz).
if(BYTEPS_FUZZERS)
  add_custom_target(fuzzers)
  add_library(fuzz_targets OBJECT tests/fuzz/membership_fuzzer.cc tests/fuzz/server_fuzzer.cc)
  target_compile_options(fuzz_targets PRIVATE ${WARNINGS} ${ARRAYS_THAT_GROW})
  target_link_libraries(fuzz_targets PRIVATE server_recovery)
  foreach(name backup declarations frame hello http membership meta rdma server)
    add_executable(${name}_fuzzer $<TARGET_OBJECTS:fuzz_targets>)
    target_link_options(${name}_fuzzer PRIVATE -fsanitize=fuzzer
      LINKER:--defsym=LLVMFuzzerTestOneInput=Fuzz_${name})
    target_link_libraries(${name}_fuzzer PRIVATE server_recovery scheduler_recovery)
    add_dependencies(fuzzers ${name}_fuzzer)
  endforeach()
endif()
